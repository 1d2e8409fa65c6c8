// Runs every collective of comm.h between the ranks of this run, on the device of this build, and checks the results:
//
//   mpirun -np N build/cpu/comm_check [--large] [--nccl] [--groups SIZE] [--seconds S] [--stall RANK]
//
// Moved bytes and sums of small integers must be exact, and sums of reals within the bound of their roundings. All
// ranks must get equal bits, in two runs as well; the digest of all sums of reals is printed at the end. The memory
// around the values must not change. One changed element of one rank's contribution must be detected. --large adds
// sizes over 8 million elements. --nccl uses comm_nccl.cpp also on the CPU device, with a library that a test provides
// instead of NCCL. --stall: one rank stays away from the last collective, and the others abort it. --groups: the same
// in groups of SIZE neighbours, and of the ranks at equal positions in these. Exit 1: wrong result, 6: lost rank.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>

#include "llmc/base/check.h"
#include "llmc/parallel/comm/comm_nccl.h"
#include "llmc/parallel/rank_place.h"
#include "llmc/parallel/groups.h"
#include "tests/support/comm_case.h"

namespace {

using Bytes = std::vector<uint8_t>;
using Clock = std::chrono::steady_clock;

// Device memory between guard zones.
class DeviceBytes {
public:
    DeviceBytes(Ctx& ctx, int64_t bytes) : ctx_(ctx), bytes_(bytes) {
        memory_ = static_cast<uint8_t*>(device::device_alloc(bytes + 2 * kGuard));
        device::fill_bytes(ctx, memory_, kGuardByte, bytes + 2 * kGuard);
    }
    ~DeviceBytes() { device::device_free(memory_); }
    DeviceBytes(const DeviceBytes&) = delete;

    Tensor view(Dtype dtype) const { return {memory_ + kGuard, dtype, bytes_ / dtype_bytes(dtype)}; }
    void upload(const Bytes& bytes) {
        device::copy_to_device(ctx_, memory_ + kGuard, bytes.data(), bytes_);
        device::synchronize(ctx_);
    }
    // Empty if a guard changed.
    Bytes download() {
        Bytes all(static_cast<size_t>(bytes_ + 2 * kGuard));
        device::copy_to_host(ctx_, all.data(), memory_, bytes_ + 2 * kGuard);
        device::synchronize(ctx_);
        const Bytes guard(kGuard, kGuardByte);
        if (!std::equal(guard.begin(), guard.end(), all.begin())) return {};
        if (!std::equal(guard.begin(), guard.end(), all.end() - kGuard)) return {};
        return {all.begin() + kGuard, all.end() - kGuard};
    }

private:
    static constexpr int64_t kGuard = 256;
    static constexpr uint8_t kGuardByte = 0x5a;
    Ctx& ctx_;
    const int64_t bytes_;
    uint8_t* memory_;
};

class Checker {
public:
    Checker(Comm& comm, Ctx& ctx) : comm_(comm), ctx_(ctx), rank_(comm.world().rank), ranks_(comm.world().ranks) {}

    void check(const Case& c) {
        if (c.call == Call::kExchange && partner() < 0) return skip_exchange();
        if (c.call == Call::kExchangeAll && ranks_ == 1) return;
        const Bytes mine = input(c, rank_), expected = expect(c);
        expect_no_error(c, difference(c, run(c, mine), expected));
        // Changes the middle element of the last rank's contribution: some rank must see it.
        Bytes changed = mine;
        const bool last = rank_ == (c.call == Call::kExchange ? ranks_ / 2 * 2 : ranks_) - 1;
        if (last) change(c, changed);
        const bool seen = !difference(c, run(c, changed), expected).empty();
        const int64_t found = comm_.sum(std::vector<int64_t>{seen})[0];
        if (found == 0) expect_no_error(c, "a changed element of the last rank changed nothing");
        cases_++;
    }

    // Equal bits on every rank (of a reduce-scatter every rank has another block) and in two runs.
    void check_bits(const Case& c) {
        const Bytes mine = input(c, rank_);
        const Bytes first = run(c, mine), second = run(c, mine);
        expect_no_error(c, difference(c, first, expect(c)));
        expect_no_error(c, first == second ? "" : "two runs have different bits");
        const auto [begin, end] = defined(c);
        const std::string own(first.begin() + begin, first.begin() + end);
        for (const std::string& theirs : comm_.gather(own)) {
            if (c.call == Call::kSum) expect_no_error(c, theirs == own ? "" : "ranks have different bits");
            for (const char byte : theirs) digest_ = (digest_ ^ static_cast<uint8_t>(byte)) * 0x100000001b3ull;
        }
        cases_++;
    }

    // Two streams that are ordered by events alone, with sums on both at the same time.
    void check_side_stream() {
        const Case c{Call::kSum, Dtype::kFp32, 300'007, Values::kIntegers};
        const Bytes mine = input(c, rank_), expected = expect(c);
        Ctx side;
        device::side_open(side, ctx_);
        Event *ready = device::event_create(), *reduced = device::event_create();
        DeviceBytes a(ctx_, bytes(c)), b(ctx_, bytes(c)), moved(ctx_, bytes(c));
        a.upload(mine);
        b.upload(mine);
        for (int i = 0; i < 20; i++) device::fill_bytes(ctx_, moved.view(c.dtype).data, i, bytes(c));
        device::copy_on_device(ctx_, moved.view(c.dtype).data, a.view(c.dtype).data, bytes(c));
        device::event_record(ctx_, ready);
        device::event_order(side, ready);
        comm_.sum(side, moved.view(c.dtype));
        comm_.sum(ctx_, b.view(c.dtype));
        device::event_record(side, reduced);
        device::event_order(ctx_, reduced);
        device::copy_on_device(ctx_, a.view(c.dtype).data, moved.view(c.dtype).data, bytes(c));
        expect_no_error(c, difference(c, a.download(), expected));
        expect_no_error(c, difference(c, b.download(), expected));
        device::event_destroy(ready);
        device::event_destroy(reduced);
        device::side_close(side);
        cases_++;
    }

    // A rehearsal touches nothing, whatever the pointers.
    void check_rehearsal() {
        Ctx rehearsal = ctx_;
        rehearsal.rehearsal = true;
        const Tensor none{nullptr, Dtype::kFp32, 12 * ranks_};
        comm_.sum(rehearsal, none);
        comm_.max(rehearsal, nullptr, 12);
        comm_.reduce_scatter(rehearsal, none);
        comm_.all_gather(rehearsal, none);
        comm_.all_to_all(rehearsal, none, none);
        Ctx side;
        device::side_open(side, rehearsal);
        device::side_close(side);
        cases_++;
    }

    void check_host() {
        const std::vector<std::string> texts = comm_.gather(std::string(static_cast<size_t>(rank_) * 3, 'x'));
        for (size_t r = 0; r < texts.size(); r++) CHECK(texts[r] == std::string(3 * r, 'x'), "gather: rank %zu", r);
        const std::vector<int64_t> total = comm_.sum(std::vector<int64_t>{1, rank_, int64_t{1} << 40});
        CHECK(total[0] == ranks_ && total[1] == ranks_ * (ranks_ - 1) / 2 && total[2] == ranks_ * (int64_t{1} << 40),
              "sum of integers");
        cases_++;
    }

    // Times a call, on the host and from start to end.
    void print_latency() {
        DeviceBytes one(ctx_, 4);
        one.upload(Bytes(4, 0));
        constexpr int kCalls = 200;
        comm_.sum(ctx_, one.view(Dtype::kInt32));
        device::synchronize(ctx_);
        const Clock::time_point start = Clock::now();
        for (int i = 0; i < kCalls; i++) comm_.sum(ctx_, one.view(Dtype::kInt32));
        const Clock::time_point called = Clock::now();
        device::synchronize(ctx_);
        auto us = [&](Clock::time_point end) {
            return std::chrono::duration<double, std::micro>(end - start).count() / kCalls;
        };
        if (comm_.root())
            std::printf("sum of one value: %.1f us on the host, %.1f us until done\n", us(called), us(Clock::now()));
    }

    int cases() const { return cases_; }
    uint64_t digest() const { return digest_; }

private:
    bool in_blocks(const Case& c) const {
        return c.call >= Call::kReduceScatter && c.call != Call::kExchange;
    }
    // Elements that rank a sends to rank b in exchange_all: different numbers, sometimes none.
    static int64_t sent(const Case& c, int a, int b) {
        if (a == b || (2 * a + b) % 5 == 3) return 0;
        return c.elems - (c.elems > 1 ? (a + b) % 2 : 0);
    }
    int64_t elems(const Case& c) const { return in_blocks(c) ? c.elems * ranks_ : c.elems; }
    int64_t bytes(const Case& c) const { return elems(c) * dtype_bytes(c.dtype); }
    int partner() const { return (rank_ ^ 1) < ranks_ ? rank_ ^ 1 : -1; }
    // A rank without a partner also takes part in the exchange of results.
    void skip_exchange() {
        comm_.gather("");
        comm_.sum(std::vector<int64_t>{0});
        cases_++;
    }

    Bytes input(const Case& c, int rank) const {
        Bytes data(static_cast<size_t>(bytes(c)));
        const int64_t size = dtype_bytes(c.dtype);
        for (int64_t i = 0; i < elems(c); i++) {
            uint8_t* at = data.data() + i * size;
            const uint64_t bits = number(c, rank, i);
            if (c.values == Values::kBits) std::memcpy(at, &bits, static_cast<size_t>(size));
            else store(at, c.dtype, value_of(c, rank, ranks_, i));
        }
        return data;
    }

    // The bytes of the result that are defined.
    std::pair<int64_t, int64_t> defined(const Case& c) const {
        const int64_t block = c.elems * dtype_bytes(c.dtype);
        if (c.call == Call::kReduceScatter) return {rank_ * block, (rank_ + 1) * block};
        return {0, bytes(c)};
    }

    Bytes expect(const Case& c) const {
        const int64_t block = c.elems * dtype_bytes(c.dtype);
        if (c.call == Call::kExchange) return input(c, partner());
        std::vector<Bytes> all;
        for (int r = 0; r < ranks_; r++) all.push_back(input(c, r));
        Bytes result(static_cast<size_t>(bytes(c)));
        const int64_t size = dtype_bytes(c.dtype);
        for (int r = 0; in_blocks(c) && r < ranks_; r++) {
            const int from = c.call == Call::kAllGather ? r : rank_;
            const int64_t count = c.call == Call::kExchangeAll ? sent(c, r, rank_) * size : block;
            std::copy_n(all[static_cast<size_t>(r)].begin() + from * block, count, result.begin() + r * block);
        }
        if (in_blocks(c) && c.call != Call::kReduceScatter) return result;
        for (int64_t i = 0; i < elems(c); i++) {
            double sum = 0;
            uint32_t largest = 0, bits = 0;
            for (const Bytes& theirs : all) {
                std::memcpy(&bits, theirs.data() + i * size, static_cast<size_t>(std::min<int64_t>(size, 4)));
                largest = std::max(largest, bits);
                sum += load(theirs.data() + i * size, c.dtype);
            }
            if (c.call == Call::kMax) std::memcpy(result.data() + i * size, &largest, sizeof largest);
            else store(result.data() + i * size, c.dtype, sum);
        }
        return result;
    }

    Bytes run(const Case& c, const Bytes& mine) {
        const bool moves = c.call >= Call::kAllToAll;
        DeviceBytes data(ctx_, bytes(c));
        // In an all-gather, what the other ranks hold at their places of the buffer has no effect.
        Bytes start = mine;
        if (c.call == Call::kAllGather) {
            const int64_t block = c.elems * dtype_bytes(c.dtype);
            for (int64_t i = 0; i < bytes(c); i++)
                if (i / block != rank_) start[static_cast<size_t>(i)] ^= 0xff;
        }
        data.upload(start);
        const Tensor view = data.view(c.dtype);
        if (moves) {
            DeviceBytes out(ctx_, bytes(c));
            out.upload(Bytes(mine.size(), 0));
            if (c.call == Call::kAllToAll) comm_.all_to_all(ctx_, out.view(c.dtype), view);
            else if (c.call == Call::kExchange) comm_.exchange(ctx_, out.view(c.dtype), view, partner());
            Counts received, sends;
            for (int r = 0; r < ranks_; r++) received.push_back(sent(c, r, rank_)), sends.push_back(sent(c, rank_, r));
            if (c.call == Call::kExchangeAll) comm_.exchange_all(ctx_, out.view(c.dtype), view, received, sends);
            const Bytes result = out.download();
            return data.download() == mine ? result : Bytes{};
        }
        switch (c.call) {
            case Call::kSum: comm_.sum(ctx_, view); break;
            case Call::kMax: comm_.max(ctx_, static_cast<uint32_t*>(view.data), view.elems); break;
            case Call::kReduceScatter: comm_.reduce_scatter(ctx_, view); break;
            default: comm_.all_gather(ctx_, view); break;
        }
        return data.download();
    }

    // Error bound of a sum of reals: one rounding for every addition.
    double bound(const Case& c, int64_t i) const {
        if (c.values != Values::kReals) return 0;
        double magnitude = 0;
        for (int r = 0; r < ranks_; r++) magnitude += std::fabs(value_of(c, r, ranks_, i));
        const double roundoff = c.dtype == Dtype::kFp64 ? 0x1p-53 : 0x1p-24;
        return ranks_ * roundoff * magnitude;
    }

    // Names the first element that differs from the expected one; "" if there is none.
    std::string difference(const Case& c, const Bytes& found, const Bytes& expected) const {
        if (found.empty()) return "bytes outside of the result changed";
        const int64_t size = dtype_bytes(c.dtype);
        const auto [begin, end] = defined(c);
        if (std::equal(found.begin() + begin, found.begin() + end, expected.begin() + begin)) return "";
        for (int64_t at = begin; at < end; at += size) {
            const uint8_t *a = found.data() + at, *b = expected.data() + at;
            if (std::equal(a, a + size, b)) continue;
            if (c.values == Values::kBits) return strf("element %lld has other bytes", (long long)(at / size));
            const double x = load(a, c.dtype), y = load(b, c.dtype);
            if ((std::isnan(x) && std::isnan(y)) || std::fabs(x - y) <= bound(c, at / size)) continue;
            return strf("element %lld is %.9g, not %.9g", (long long)(at / size), x, y);
        }
        return "";
    }

    void change(const Case& c, Bytes& data) const {
        // With blocks: an element that is communicated; in an all-gather one of the rank's own block.
        const int64_t size = dtype_bytes(c.dtype);
        int64_t i = c.call == Call::kAllGather ? rank_ * c.elems + c.elems / 2 : elems(c) / 2;
        for (int r = 0; c.call == Call::kExchangeAll && r < ranks_; r++)
            if (sent(c, rank_, r) > 0) i = r * c.elems;
        while (c.values == Values::kSpecial && i % 5 < 3) i++;
        uint8_t* at = data.data() + i * size;
        if (c.call == Call::kMax) std::memset(at, 0xff, static_cast<size_t>(size));
        else if (c.values == Values::kBits) at[size - 1] ^= 0x40;
        else store(at, c.dtype, load(at, c.dtype) + (load(at, c.dtype) > 0 ? -64 : 64));
    }

    void expect_no_error(const Case& c, const std::string& error) {
        const std::vector<std::string> all = comm_.gather(error);
        for (size_t r = 0; r < all.size(); r++)
            if (!all[r].empty()) FAIL(kExitBug, "%s: rank %zu: %s", c.name(elems(c)).c_str(), r, all[r].c_str());
    }

    Comm& comm_;
    Ctx& ctx_;
    const int rank_, ranks_;
    int cases_ = 0;
    uint64_t digest_ = 0xcbf29ce484222325ull;
};

void check_all(Checker& checker, bool large) {
    using enum Call;
    const Dtype bytes[] = {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64, Dtype::kInt32, Dtype::kE4m3, Dtype::kE5m2};
    std::vector<int64_t> sizes = {1, 2, 3, 31, 1000, 4099, 65'537};
    // More elements than one message holds.
    if (large) sizes.push_back(8'400'001);
    for (const int64_t size : sizes) {
        for (const Dtype dtype : {Dtype::kFp32, Dtype::kFp64, Dtype::kInt32}) {
            checker.check({kSum, dtype, size, Values::kIntegers});
            if (dtype != Dtype::kInt32) checker.check_bits({kSum, dtype, size, Values::kReals});
        }
        checker.check({kMax, Dtype::kInt32, size, Values::kBits});
        checker.check({kReduceScatter, Dtype::kFp32, size, Values::kIntegers});
        checker.check_bits({kReduceScatter, Dtype::kFp32, size, Values::kReals});
        for (const Call call : {kAllGather, kAllToAll, kExchange, kExchangeAll})
            for (const Dtype dtype : bytes) checker.check({call, dtype, size, Values::kBits});
    }
    for (const Dtype dtype : {Dtype::kFp32, Dtype::kFp64})
        checker.check({kSum, dtype, 1003, Values::kSpecial});
    checker.check({kReduceScatter, Dtype::kFp32, 1003, Values::kSpecial});
    checker.check_side_stream();
    checker.check_rehearsal();
    checker.check_host();
}

// One rank stays away from a collective for `seconds`; after two seconds the others abort it, and can use their stream
// again.
void stall(Comm& comm, Ctx& ctx, int away, int seconds) {
    if (comm.world().rank == away) {
        std::this_thread::sleep_for(std::chrono::seconds(seconds));
        comm.abort_collectives();
        return;
    }
    DeviceBytes values(ctx, 1 << 24);
    Event* done = device::event_create();
    comm.sum(ctx, values.view(Dtype::kFp32));
    device::event_record(ctx, done);
    std::this_thread::sleep_for(std::chrono::seconds(2));
    CHECK(!device::event_reached(done), "a sum ended without rank %d", away);
    const Clock::time_point start = Clock::now();
    std::thread([&] { comm.abort_collectives(); }).join();
    device::synchronize(ctx);
    std::fprintf(stderr, "rank %d: cut off in %.3f s, late error \"%s\"\n", comm.world().rank,
                 std::chrono::duration<double>(Clock::now() - start).count(), comm.async_error().c_str());
    device::event_destroy(done);
}

// Tests gathers and exchanges in Comm::shared_memory, where rank r's block has the bytes r + 1. Returns a note.
std::string check_shared_memory(Comm& comm, Ctx& ctx, int seconds) {
    constexpr int64_t kBlock = 1024;
    const int64_t rank = comm.world().rank, elems = comm.world().ranks * kBlock;
    std::string why;
    auto* const memory = static_cast<uint8_t*>(comm.shared_memory(ctx, 2 * elems, why));
    if (!memory) return why.empty() ? "" : "no shared memory: " + why;
    const Tensor in{memory, Dtype::kE4m3, elems}, out{memory + elems, Dtype::kE4m3, elems};
    comm.share(ctx, {{memory, Dtype::kE4m3, 2 * elems}}, seconds);
    comm.share(ctx, {in, out}, seconds);   // instead
    device::fill_bytes(ctx, in.slice(rank * kBlock, kBlock).data, static_cast<int>(rank) + 1, kBlock);
    comm.all_gather(ctx, in);
    std::vector<uint8_t> bytes(static_cast<size_t>(2 * elems));
    for (const auto exchange : {&Comm::all_to_all, &Comm::exchange_shards}) {
        (comm.*exchange)(ctx, out, in);
        device::copy_to_host(ctx, bytes.data(), memory, 2 * elems);
        device::fill_bytes(ctx, out.data, 0, elems);
        device::synchronize(ctx);
        for (int64_t i = 0; i < 2 * elems; i++) {
            if (exchange == &Comm::exchange_shards && i / kBlock == comm.world().ranks + rank) continue;   // undefined
            const int64_t want = i < elems ? i / kBlock + 1 : rank + 1, found = bytes[static_cast<size_t>(i)];
            CHECK(found == want, "shared memory: byte %lld is %lld, expected %lld", ll(i), ll(found), ll(want));
        }
    }
    return "collectives in shared memory as expected";
}

}  // namespace

int main(int argc, char** argv) {
    std::unique_ptr<Comm> comm;
    try {
        bool large = false, nccl = false;
        int seconds = 60, away = -1, size = 0;
        for (int i = 1; i < argc; i++) {
            const std::string option = argv[i];
            if (option == "--large") large = true;
            else if (option == "--nccl") nccl = true;
            else if (option == "--seconds" && i + 1 < argc) seconds = std::stoi(argv[++i]);
            else if (option == "--groups" && i + 1 < argc) size = std::stoi(argv[++i]);
            else if (option == "--stall" && i + 1 < argc) away = std::stoi(argv[++i]);
            else FAIL(kExitBadInput, "no option %s", option.c_str());
        }
        comm = open_comm();
        if (nccl) comm = open_nccl(std::move(comm));
        std::vector<std::string> notes;
        Ctx ctx;
        device::device_open(ctx, place_rank(*comm, notes));
        notes.push_back(comm->connect(ctx, seconds));
        Checker checker(*comm, ctx);
        check_all(checker, large);
        int cases = checker.cases();
        if (size > 0) {
            const Groups groups(*comm, {.context = size, .shard = size});
            groups.connect(ctx, seconds);
            for (Comm* group : {&groups.context, &groups.replicas}) {
                Checker within(*group, ctx);
                check_all(within, large);
                cases += within.cases();
            }
            Checker again(*comm, ctx);   // the group of all ranks still works
            check_all(again, large);
        }
        notes.push_back(check_shared_memory(*comm, ctx, seconds));
        checker.print_latency();
        if (comm->root()) {
            for (const std::string& note : notes) std::printf("%s\n", note.c_str());
            std::printf("comm_check: %d ranks, %d cases as expected, digest %016llx\n", comm->world().ranks,
                        cases, (unsigned long long)checker.digest());
        }
        const std::string late = comm->async_error();
        if (!late.empty()) {
            comm->abort_collectives();
            FAIL(kExitPeerLost, "%s", late.c_str());
        }
        if (away >= 0) stall(*comm, ctx, away, seconds);
        device::device_close(ctx);
        return kExitOk;
    } catch (const std::exception& error) {
        return end_with_error(comm.get(), error);
    }
}
