// Optimizer states in pinned host memory (--offload; ZeRO-Offload: Ren et al., arXiv 2101.06840, but the update runs on
// the device). A pass over the states copies them in chunks to device buffers and back. The copies of each direction
// have a stream of their own, so that both directions of the link are busy. Only events order these streams and the
// compute stream.
#pragma once
#include <functional>
#include <vector>

#include "llmc/model/parameters/optimizer_state.h"
#include "llmc/parallel/zero/state_places.h"
#include "llmc/ops/owned.h"

enum class OffloadAccess : uint8_t {
    kReadSource,    // one state is copied in, of which weights are made; nothing is copied back
    kUpdate,        // all states are copied in and back
    kFinish,        // all states but moments are copied in and back
    kWrite,         // all states are copied back; their values before the pass are undefined
};
constexpr bool copies(OffloadAccess access, StateKind kind, StateKind source = StateKind::kMaster) {
    if (access == OffloadAccess::kReadSource) return kind == source;
    return access != OffloadAccess::kFinish || !state_row(kind).moment;
}

class OffloadedState {
public:
    static constexpr int64_t kBuffers = 4;   // one is copied in, one is used, one is copied back; and a spare one
    struct Kind {
        StateKind kind;
        Dtype dtype;
        StatePlaces places;
        int64_t values;   // in host memory, those of [begin, end) that are stored or more
    };
    // Offloads the elements [begin, end) of the states, in chunks of equal size. Allocates device buffers from
    // the arena, and host memory unless it only measures.
    OffloadedState(const std::vector<Kind>& kinds, int64_t begin, int64_t end, Arena& arena);

    bool has(StateKind kind) const { return find(kind) != nullptr; }
    int64_t begin() const { return begin_; }
    int64_t host_bytes() const;

    // Calls use(begin, end) for every chunk, in order. What `use` enqueues on ctx may access at() of these elements. No
    // host synchronisation. source: of kReadSource.
    void pass(Ctx& ctx, OffloadAccess access, const std::function<void(int64_t begin, int64_t end)>& use,
              StateKind source = StateKind::kMaster);
    // Begins to copy in the first chunks of the next pass, which must be an update.
    void prefetch(Ctx& ctx);
    // Elements of the chunk in use, on the device.
    Tensor at(StateKind kind, int64_t begin, int64_t elems) const;

    // The element `index` in host memory, once all copies are done. Blocking.
    void* host(StateKind kind, int64_t index);

private:
    struct HostState {
        Kind kind;
        char* memory = nullptr;              // null while rehearsing
        Tensor buffers[kBuffers];            // of the values of chunk_ elements
    };
    struct Buffer {
        OwnedEvent loaded;   // on in_: the elements are copied in
        OwnedEvent used;     // on the compute stream: it does not use the buffer any more
        OwnedEvent free;     // the next chunk may be copied in; on out_, or on compute if nothing is copied back
    };
    // Where the element `index` is in host memory.
    static char* place(const HostState& host, int64_t begin, int64_t index) {
        const int64_t elems = host.kind.places.at(index) - host.kind.places.at(begin);
        return host.memory + state_row(host.kind.kind).values(elems) * dtype_bytes(host.kind.dtype);
    }
    const HostState* find(StateKind kind) const;
    Buffer& buffer(int64_t chunk) { return ring_[chunk % kBuffers]; }
    int64_t chunks() const { return ceil_div(end_ - begin_, chunk_); }
    int64_t first(int64_t chunk) const { return begin_ + chunk * chunk_; }
    int64_t last(int64_t chunk) const { return std::min(end_, first(chunk) + chunk_); }
    void open(const Ctx& ctx);
    void load(int64_t chunk, OffloadAccess access, StateKind source = StateKind::kMaster);
    void store(int64_t chunk, OffloadAccess access);
    // The stored values of a chunk, and how many of them are before `index`.
    int64_t stored(const Kind& kind, int64_t chunk) const { return before(kind, chunk, last(chunk)); }
    int64_t before(const Kind& kind, int64_t chunk, int64_t index) const {
        return state_row(kind.kind).values(kind.places.at(index) - kind.places.at(first(chunk)));
    }

    std::vector<HostState> states_;
    const int64_t begin_, end_;
    const int64_t chunk_;        // elements
    int64_t in_use_ = -1;        // chunk
    int64_t prefetched_ = 0;     // chunks
    Buffer ring_[kBuffers];
    SideStream in_, out_;        // of the copies, closed until the first pass
};
