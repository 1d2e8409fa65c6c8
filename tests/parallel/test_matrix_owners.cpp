// The ranks that own the matrices of Muon, and what every rank holds of them.
#include "llmc/parallel/zero/matrix_owners.h"

#include <algorithm>
#include <map>

#include "tests/support/zero_test.h"

namespace {

// Whether each matrix has one owner, and none could be added to a rank with less to do: largest first, each matrix was
// given to the rank that had least.
bool is_balanced(const std::vector<OwnedMatrix>& matrices, int ranks) {
    std::vector<double> load(static_cast<size_t>(ranks));
    double last = HUGE_VAL;
    for (const OwnedMatrix& m : matrices) {
        if (m.flops() > last) return false;
        last = m.flops();
        double& own = load.at(static_cast<size_t>(m.owner));
        for (int r = 0; r < ranks; r++) {
            const double other = load[static_cast<size_t>(r)];
            if (other < own || (other == own && r < m.owner)) return false;
        }
        own += m.flops();
    }
    return true;
}

}  // namespace

TEST_CASE("muon: ranks wait less than 1.5 % for the largest matrix of a round in models of 124M, 8B and 70B") {
    const Fp8Plan plan;
    for (const char* name : {"gpt2-124M", "llama3-8B", "llama3.1-70B"}) {
        Config config;
        config.shape = find_model_preset(name)->config;
        config.optimizer = OptimizerKind::kMuon;
        const ParamTable table = make_param_table(config);
        for (int ranks : {1, 2, 3, 4, 8}) {
            CAPTURE(name);
            CAPTURE(ranks);
            const FlatLayout layout(table, plan, 1 << 30, Buckets::unit(ranks));
            const MatrixOwners owners(table, Buckets(layout, ranks), ranks, ranks);
            double all = 0, longest = 0;
            for (size_t round = 0; round < owners.rounds(); round++) {
                double most = 0;
                for (int r = 0; r < ranks; r++) {
                    const OwnedMatrix* m = owners.matrix(round, r);
                    all += m ? m->flops() : 0;
                    most = std::max(most, m ? m->flops() : 0);
                }
                longest += most;
            }
            CHECK(longest * ranks < 1.015 * all);
        }
    }
}

TEST_CASE("muon: each matrix has one owner, and owners have equally much to do") {
    Config config = fp8_config(fp8_shapes()[1], Fp8Recipe::kNone);
    config.optimizer = OptimizerKind::kMuon;
    config.shape.num_layers = 3;
    const ParamTable table = make_param_table(config);
    for (int ranks : {1, 2, 3, 5, 64}) {
        CAPTURE(ranks);
        std::vector<OwnedMatrix> matrices = assign_owners(table, ranks);
        CHECK(matrices == assign_owners(table, ranks));
        CHECK(matrices.size() == 3 * 7);   // Q, K, V, O, gate, up, down
        CHECK(is_balanced(matrices, ranks));
        std::map<int, int64_t> covered;
        for (const OwnedMatrix& m : matrices) covered[m.param] += m.elems();
        for (const auto& [param, elems] : covered) CHECK(elems == table.params[static_cast<size_t>(param)].elems());
        if (ranks == 1) continue;
        for (size_t i = 0; i < matrices.size(); i++) {   // a table with one other owner is found
            std::vector<OwnedMatrix> mutated = matrices;
            mutated[i].owner = (mutated[i].owner + 1) % ranks;
            CHECK(!is_balanced(mutated, ranks));
        }
        // The parts of a matrix that ranks hold are all of it, in order, and rounds have every matrix once.
        const Fp8Plan plan;
        const FlatLayout layout(table, plan, 20000, Buckets::unit(ranks));
        const Buckets buckets(layout, ranks);
        const MatrixOwners owners(table, buckets, ranks, ranks);
        size_t found = 0;
        for (size_t round = 0; round < owners.rounds(); round++)
            for (int r = 0; r < ranks; r++) {
                const OwnedMatrix* m = owners.matrix(round, r);
                if (!m) continue;
                CHECK(m->owner == r);
                found++;
                int64_t end = 0;
                for (int shard = 0; shard < ranks; shard++) {
                    const MatrixPart part = owners.held(*m, shard);
                    if (part.elems == 0) continue;
                    CHECK(part.begin == end);
                    end += part.elems;
                }
                CHECK(end == m->elems());
            }
        CHECK(found == matrices.size());
        // Messages bring each element of a matrix to its owner once, and of its result to each shard.
        std::map<const OwnedMatrix*, int64_t> arrived, returned;
        for (size_t exchange = 0; exchange < owners.exchanges(); exchange++)
            for (int from = 0; from < ranks; from++)
                for (int to = 0; to < ranks; to++) {
                    const MatrixOwners::Message message = owners.message(exchange, from, to);
                    if (message.matrix) arrived[message.matrix] += message.part.elems;
                    if (message.result) returned[message.result] += message.result_part.elems;
                    if (from != to) CHECK(message.elems() <= owners.longest(exchange));
                }
        CHECK((arrived == returned && arrived.size() == matrices.size()));
        for (const auto& [matrix, elems] : arrived) CHECK(elems == matrix->elems());
    }
}
