// A training state in host memory that is sharded as buckets are, for tests of checkpoints.
#pragma once

#include "llmc/model/parameters/flat_layout.h"
#include "llmc/model/parameters/params.h"
#include "tests/support/checkpoint_test.h"
#include "tests/support/local_ranks.h"

namespace checkpoint_test {

using Strings = std::vector<std::string>;
inline Strings nothing(int ranks) { return Strings(static_cast<size_t>(ranks), "nothing"); }   // errors of run_ranks()

using Held = std::vector<std::vector<ElementRange>>;   // by parameter

// Ranges that rank `rank` of `ranks` owns: parameters fill buckets of at least bucket_elems, linears separately from
// the others; each bucket is divided into equal blocks of a multiple of kParamAlign elements. One rank, or zero 0: all.
inline Held held_by(const ParamTable& table, int rank, int ranks, int64_t bucket_elems, bool zero) {
    Held held;
    if (!zero) {
        for (const Param& param : table.params) held.push_back({{0, param.elems()}});
        return held;
    }
    held.resize(table.params.size());
    for (bool matrices : {true, false}) {
        std::vector<std::pair<size_t, int64_t>> bucket;   // parameters and where they begin
        int64_t elems = 0;
        auto close = [&] {
            const int64_t unit = ranks * kParamAlign, block = (elems + unit - 1) / unit * kParamAlign;
            for (const auto& [p, offset] : bucket) {
                const int64_t begin = std::max<int64_t>(0, rank * block - offset);
                const int64_t end = std::min(table.params[p].elems(), (rank + 1) * block - offset);
                if (begin < end) held[p].push_back({begin, end - begin});
            }
            bucket.clear();
            elems = 0;
        };
        for (size_t p = 0; p < table.params.size(); p++) {
            const Param& param = table.params[p];
            if ((param.layer >= 0 && !param.is_vector()) != matrices) continue;
            bucket.emplace_back(p, elems);
            elems += (param.elems() + kParamAlign - 1) / kParamAlign * kParamAlign;
            if (elems >= bucket_elems) close();
        }
        close();
    }
    return held;
}

// One rank's part of a state. Checks that elements of others are not accessed.
struct FakeShards : FakeState {
    Held held;
    Comm& comm;
    bool zero;

    FakeShards(const FakeState& like, Comm& comm_, bool zero_ = true, int64_t bucket_elems = 3000)
        : FakeState(like.config, like.dtypes),
          held(held_by(table, comm_.world().rank, comm_.world().ranks, bucket_elems, zero_)), comm(comm_),
          zero(zero_ && comm_.world().ranks > 1) {}

    // Copies this rank's part of another state.
    void take(FakeState& whole) {
        for (const OptimizerState& row : kOptimizerStates) each_held([&](size_t p, const ElementRange& part) {
            if (!table.params[p].has(row.kind)) return;
            const int64_t size = dtype_bytes(dtypes.of(row.kind)), begin = row.values(part.begin) * size;
            const int64_t end = row.values(part.begin + part.count) * size;
            std::copy_n(whole.of(row.kind)[p].data() + begin, end - begin, of(row.kind)[p].data() + begin);
        });
    }
    // Whether this rank's part equals that of `whole` and the rest is untouched.
    bool part_of(FakeState& whole) {
        FakeShards expected(whole, comm, zero);
        expected.held = held;
        expected.take(whole);
        for (const OptimizerState& row : kOptimizerStates)
            if (expected.of(row.kind) != of(row.kind)) return false;
        return true;
    }

    StateAccess access() {
        StateAccess access = FakeState::access();
        access.held = [this](int index) { return held.at(static_cast<size_t>(index)); };
        access.read = [this, read = access.read](StateKind kind, int index, int64_t begin, int64_t count, void* host) {
            check_held(kind, index, begin, count);
            read(kind, index, begin, count, host);
        };
        access.write = [this, write = access.write](StateKind kind, int index, int64_t begin, int64_t count,
                                                    const void* host) {
            check_held(kind, index, begin, count);
            write(kind, index, begin, count, host);
        };
        return access;
    }

private:
    template <typename Use> void each_held(Use&& use) {
        for (size_t p = 0; p < held.size(); p++)
            for (const ElementRange& part : held[p]) use(p, part);
    }
    void check_held(StateKind kind, int index, int64_t begin, int64_t count) {
        const OptimizerState& row = state_row(kind);
        bool inside = false;
        for (const ElementRange& part : held.at(static_cast<size_t>(index)))
            inside |= row.values(part.begin) <= begin && begin + count <= row.values(part.begin + part.count);
        CHECK_MESSAGE(inside, "an element of another rank was touched");
    }
};

}  // namespace checkpoint_test
