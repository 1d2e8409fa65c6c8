#include "llmc/parallel/zero/offloaded_state.h"

#include <algorithm>
#include <utility>

#include "llmc/model/parameters/flat_layout.h"

namespace {

constexpr int64_t kMostChunkBytes = 128'000'000;   // of all kinds together

// Whole units of alignment, so few that each buffer gets two chunks of a small state.
int64_t chunk_elems(const std::vector<OffloadedState::Kind>& kinds, int64_t elems) {
    int64_t bytes = 0;   // of a unit of alignment
    for (const OffloadedState::Kind& kind : kinds)
        bytes += state_row(kind.kind).values(kParamAlign) * dtype_bytes(kind.dtype);
    const int64_t units = ceil_div(elems, kParamAlign * 2 * OffloadedState::kBuffers);
    return std::min(units, kMostChunkBytes / bytes) * kParamAlign;
}

}  // namespace

OffloadedState::OffloadedState(const std::vector<Kind>& kinds, int64_t begin, int64_t end, Arena& arena)
    : begin_(begin), end_(end), chunk_(chunk_elems(kinds, end - begin)) {
    CHECK(!kinds.empty() && begin >= 0 && begin < end, "%zu states of [%lld, %lld) are offloaded", kinds.size(),
          (long long)begin, (long long)end);
    for (const Kind& kind : kinds) {
        HostState& host = states_.emplace_back();
        host.kind = kind;
        for (Tensor& one : host.buffers)
            one = arena.take(Purpose::kOffload, kind.dtype, state_row(kind.kind).values(chunk_));
        host.memory = arena.take_host(kind.values * dtype_bytes(kind.dtype));
    }
}

const OffloadedState::HostState* OffloadedState::find(StateKind kind) const {
    for (const HostState& host : states_)
        if (host.kind.kind == kind) return &host;
    return nullptr;
}

int64_t OffloadedState::host_bytes() const {
    int64_t bytes = 0;
    for (const HostState& host : states_) bytes += host.kind.values * dtype_bytes(host.kind.dtype);
    return bytes;
}

void OffloadedState::open(const Ctx& ctx) {
    if (in_.is_open()) return;
    in_.open(ctx);
    out_.open(ctx);
    in_.ctx.timer = out_.ctx.timer = nullptr;
    for (Buffer& b : ring_)
        for (OwnedEvent* event : {&b.loaded, &b.used, &b.free}) *event = OwnedEvent::create();
}

void OffloadedState::load(int64_t chunk, OffloadAccess access, StateKind source) {
    Buffer& b = buffer(chunk);
    device::event_order(in_.ctx, b.free);
    for (HostState& host : states_) {
        const Tensor to = host.buffers[chunk % kBuffers].slice(0, stored(host.kind, chunk));
        if (!to || !copies(access, host.kind.kind, source)) continue;
        const char* const from = place(host, begin_, first(chunk));
        device::copy_to_device(in_.ctx, to.data, from, to.bytes());
    }
    device::event_record(in_.ctx, b.loaded);
}

void OffloadedState::store(int64_t chunk, OffloadAccess access) {
    Buffer& b = buffer(chunk);
    device::event_order(out_.ctx, b.used);
    for (HostState& host : states_) {
        const Tensor from = host.buffers[chunk % kBuffers].slice(0, stored(host.kind, chunk));
        if (!from || !copies(access, host.kind.kind)) continue;
        char* const to = place(host, begin_, first(chunk));
        device::copy_to_host(out_.ctx, to, from.data, from.bytes());
    }
    device::event_record(out_.ctx, b.free);
}

void OffloadedState::prefetch(Ctx& ctx) {
    if (ctx.rehearsal) return;
    open(ctx);
    for (; prefetched_ < std::min(chunks(), kBuffers); prefetched_++) load(prefetched_, OffloadAccess::kUpdate);
}

void OffloadedState::pass(Ctx& ctx, OffloadAccess access, const std::function<void(int64_t, int64_t)>& use,
                          StateKind source) {
    const bool runs = !ctx.rehearsal, reads = access != OffloadAccess::kWrite;
    const bool writes = access != OffloadAccess::kReadSource;
    CHECK(prefetched_ == 0 || access == OffloadAccess::kUpdate, "chunks of an update were prefetched");
    if (runs) open(ctx);
    int64_t loaded = std::exchange(prefetched_, 0);
    for (int64_t chunk = 0; chunk < chunks(); chunk++) {
        // The last chunk that is loaded here takes the buffer of chunk - 1, which the device has then released.
        for (; runs && reads && loaded < std::min(chunks(), chunk + kBuffers); loaded++) load(loaded, access, source);
        Buffer& b = buffer(chunk);
        if (runs) device::event_order(ctx, reads ? b.loaded : b.free);
        in_use_ = chunk;
        use(first(chunk), last(chunk));
        in_use_ = -1;
        if (runs) device::event_record(ctx, writes ? b.used : b.free);
        if (runs && writes) store(chunk, access);
    }
}

Tensor OffloadedState::at(StateKind kind, int64_t begin, int64_t elems) const {
    const HostState* host = find(kind);
    CHECK(host && in_use_ >= 0 && begin >= first(in_use_) && begin + elems <= last(in_use_),
          "elements [%lld, +%lld) of an offloaded state are not on the device", (long long)begin, (long long)elems);
    return host->buffers[in_use_ % kBuffers].slice(before(host->kind, in_use_, begin), state_row(kind).values(elems));
}

void* OffloadedState::host(StateKind kind, int64_t index) {
    const HostState* host = find(kind);
    CHECK(host && index >= begin_ && index < end_, "element %lld is not in host memory", (long long)index);
    if (in_.is_open()) {
        device::synchronize(in_.ctx);
        device::synchronize(out_.ctx);
    }
    return place(*host, begin_, index);
}
