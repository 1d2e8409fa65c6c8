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
            CAPTURE(name, ranks);
            const FlatLayout layout(table, plan, 1 << 30, Buckets::unit(ranks));
            const MatrixOwners owners(table, Buckets(layout, ranks), ranks, ranks);
            double all = 0, longest = 0;
            for (size_t round = 0; round < owners.rounds(); round++) {
                double most = 0;
                for (int r = 0; r < ranks; r++) {
                    double flops = 0;
                    for (const OwnedMatrix& m : owners.batch(round, r)) flops += m.flops();
                    all += flops;
                    most = std::max(most, flops);
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
            for (int r = 0; r < ranks; r++)
                for (const OwnedMatrix& m : owners.batch(round, r)) {
                    CHECK(m.owner == r);
                    CHECK((m.rows == owners.batch(round, r)[0].rows && m.cols == owners.batch(round, r)[0].cols));
                    found++;
                    int64_t end = 0;
                    for (int shard = 0; shard < ranks; shard++) {
                        const MatrixPart part = owners.held(m, shard);
                        if (part.elems == 0) continue;
                        CHECK(part.begin == end);
                        end += part.elems;
                    }
                    CHECK(end == m.elems());
                }
        CHECK(found == matrices.size());
        // Messages bring each element of a matrix to its owner once, and of its result to each shard.
        std::map<const OwnedMatrix*, int64_t> arrived, returned;
        for (size_t exchange = 0; exchange < owners.exchanges(); exchange++)
            for (int from = 0; from < ranks; from++)
                for (int to = 0; to < ranks; to++) {
                    const MatrixOwners::Message message = owners.message(exchange, from, to);
                    int64_t end = 0;   // of the piece before
                    for (const auto* pieces : {&message.matrices, &message.results})
                        for (const MatrixOwners::Piece& piece : *pieces) {
                            (pieces == &message.matrices ? arrived : returned)[piece.matrix] += piece.part.elems;
                            CHECK((piece.at >= end && piece.at % kParamAlign == 0));
                            end = piece.at + piece.part.elems;
                        }
                    CHECK(end <= message.elems);
                    if (from != to) CHECK(message.elems <= owners.longest(exchange));
                }
        CHECK((arrived == returned && arrived.size() == matrices.size()));
        for (const auto& [matrix, elems] : arrived) CHECK(elems == matrix->elems());
    }
}

TEST_CASE("muon: matrices of one shape are in few, equally large batches of bounded memory; large ones alone") {
    const Fp8Plan plan;
    for (const char* name : {"gpt2-124M", "gpt2-1558M", "llama3-8B"})
        for (int ranks : {1, 2, 8})
            for (bool sharded : {true, false}) {
                CAPTURE(name, ranks);
                Config config;
                config.shape = find_model_preset(name)->config;
                config.optimizer = OptimizerKind::kMuon;
                const ParamTable table = make_param_table(config);
                const FlatLayout layout(table, plan, 1 << 30, Buckets::unit(ranks));
                const MatrixOwners owners(table, Buckets(layout, ranks), ranks, sharded ? ranks : 1);
                const int64_t most = MatrixOwners::kBatchElems / (sharded ? 1 : ranks);
                for (int r = 0; r < ranks; r++) {
                    std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> sizes;   // of batches, by shape
                    for (size_t round = 0; round < owners.rounds(); round++) {
                        const MatrixOwners::Batch& batch = owners.batch(round, r);
                        if (batch.empty()) continue;
                        const OwnedMatrix& one = batch[0];
                        const auto count = static_cast<int64_t>(batch.size()), side = std::min(one.rows, one.cols);
                        sizes[{one.rows, one.cols}].push_back(count);
                        CHECK((count == 1 || (side < 2048 && count * one.elems() <= most)));
                        CHECK(count * one.elems() <= owners.most_elems());
                        CHECK(count * side * side <= owners.most_squares());
                        CHECK(count <= owners.most_matrices());
                    }
                    for (const auto& [shape, counts] : sizes) {
                        const auto [least, largest] = std::minmax_element(counts.begin(), counts.end());
                        CHECK(*largest - *least <= 1);
                        // One more matrix in each would be too many, or there would be a batch less.
                        const int64_t elems = shape.first * shape.second;
                        if (counts.size() > 1 && std::min(shape.first, shape.second) < 2048) {
                            int64_t all = 0;
                            for (int64_t count : counts) all += count;
                            CHECK(all > static_cast<int64_t>(counts.size() - 1) * std::max<int64_t>(1, most / elems));
                        }
                    }
                    if (std::string(name) == "gpt2-124M" && ranks == 1)
                        CHECK(sizes == decltype(sizes){{{768, 768}, {48}}, {{768, 3072}, {12}}, {{3072, 768}, {12}}});
                }
            }
}
