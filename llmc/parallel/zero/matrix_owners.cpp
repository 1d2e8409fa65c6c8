#include "llmc/parallel/zero/matrix_owners.h"

#include <map>
#include <tuple>

// Five steps, of which a matrix far from square takes two pairs on one Gram matrix each (newton_schulz.cpp).
double OwnedMatrix::flops() const {
    const auto longer = static_cast<double>(std::max(rows, cols)), k = static_cast<double>(std::min(rows, cols));
    const double products = 2 * longer > 3 * k ? 6 * longer / k + 11 : 10 * longer / k + 5;   // of k^3
    return 2 * k * k * k * products;
}

std::vector<OwnedMatrix> assign_owners(const ParamTable& table, int ranks, int64_t parts) {
    std::vector<OwnedMatrix> matrices;
    for (size_t p = 0; p < table.params.size(); p++) {
        const Param& param = table.params[p];
        if (param.optimizer != OptimizerKind::kMuon || param.parts != parts) continue;
        int64_t begin = 0;
        for (int64_t rows : param.stacked) {
            matrices.push_back({.param = static_cast<int>(p), .begin = begin, .rows = rows, .cols = param.cols});
            begin += rows * param.cols;
        }
        CHECK(begin == param.elems(), "%s is not its matrices", param.name.c_str());
    }
    std::stable_sort(matrices.begin(), matrices.end(),
                     [](const OwnedMatrix& a, const OwnedMatrix& b) { return a.flops() > b.flops(); });
    std::vector<double> load(static_cast<size_t>(ranks));
    for (OwnedMatrix& matrix : matrices) {
        const auto least = std::min_element(load.begin(), load.end());
        *least += matrix.flops();
        matrix.owner = static_cast<int>(least - load.begin());
    }
    return matrices;
}

MatrixOwners::MatrixOwners(const ParamTable& table, const Buckets& buckets, int ranks, int shards, int parts)
    : ranks_(ranks), of_rank_(static_cast<size_t>(ranks)),
      held_(static_cast<size_t>(shards), std::vector<MatrixPart>(table.params.size())) {
    CHECK(ranks % shards == 0 && (shards == 1 || shards * parts == buckets.ranks()), "%d shards on %d ranks", shards,
          ranks);
    std::map<std::tuple<int, int64_t, int64_t>, std::vector<OwnedMatrix>> alike;   // by owner and shape
    for (const OwnedMatrix& m : assign_owners(table, ranks, parts)) alike[{m.owner, m.rows, m.cols}].push_back(m);
    for (const auto& [shape, matrices] : alike) add_batches(matrices);
    for (std::vector<Batch>& batches : of_rank_) {
        const auto flops = [](const Batch& batch) { return static_cast<double>(batch.size()) * batch[0].flops(); };
        std::stable_sort(batches.begin(), batches.end(),
                         [&](const Batch& a, const Batch& b) { return flops(a) > flops(b); });
        rounds_ = std::max(rounds_, batches.size());
    }
    const Buckets whole(buckets.layout(), 1);
    for (int shard = 0; shard < shards; shard++)
        for (const ShardRange& range : (shards == 1 ? whole : buckets).shard_ranges(shards == 1 ? 0 : shard * parts))
            held_[static_cast<size_t>(shard)][static_cast<size_t>(range.param)] = {range.begin, range.elems};
    for (size_t exchange = 0; exchange < exchanges(); exchange++) {
        longest_.push_back(0);
        for (int from = 0; from < ranks; from++)
            for (int to = 0; to < ranks; to++)
                if (from != to) longest_.back() = std::max(longest_.back(), message(exchange, from, to).elems);
    }
}

// Of one owner and shape, in as few batches as possible, which are equally large but for one matrix.
void MatrixOwners::add_batches(const std::vector<OwnedMatrix>& alike) {
    const OwnedMatrix& one = alike.front();
    const int64_t count = static_cast<int64_t>(alike.size()), k = std::min(one.rows, one.cols);
    const int64_t most = one.in_batches() ? std::clamp<int64_t>(kBatchElems * shards() / ranks_ / one.elems(), 1,
                                                                kBatchMatrices) : 1;
    const int64_t batches = ceil_div(count, most);
    for (int64_t b = 0; b < batches; b++) {
        const auto begin = alike.begin() + b * count / batches, end = alike.begin() + (b + 1) * count / batches;
        of_rank_[static_cast<size_t>(one.owner)].emplace_back(begin, end);
        const int64_t matrices = end - begin;
        most_elems_ = std::max(most_elems_, matrices * one.elems());
        most_squares_ = std::max(most_squares_, matrices * k * k);
        most_matrices_ = std::max(most_matrices_, matrices);
    }
}

const MatrixOwners::Batch& MatrixOwners::batch(size_t round, int rank) const {
    static const Batch kNone;
    const std::vector<Batch>& mine = of_rank_[static_cast<size_t>(rank)];
    return round < mine.size() ? mine[round] : kNone;
}

MatrixPart MatrixOwners::held(const OwnedMatrix& matrix, int shard) const {
    const MatrixPart& all = held_[static_cast<size_t>(shard)][static_cast<size_t>(matrix.param)];
    const int64_t begin = std::max(all.begin, matrix.begin);
    const int64_t end = std::min(all.begin + all.elems, matrix.begin + matrix.elems());
    return begin < end ? MatrixPart{begin - matrix.begin, end - begin} : MatrixPart{};
}

MatrixOwners::Message MatrixOwners::message(size_t exchange, int from, int to) const {
    Message message;
    if (holder(shard_of(from), to) == from)
        add_pieces(batch(exchange, to), shard_of(from), message.matrices, message.elems);
    if (exchange >= 2) add_pieces(batch(exchange - 2, from), shard_of(to), message.results, message.elems);
    return message;
}

void MatrixOwners::add_pieces(const Batch& batch, int shard, std::vector<Piece>& pieces, int64_t& elems) const {
    for (size_t i = 0; i < batch.size(); i++) {
        const MatrixPart part = held(batch[i], shard);
        if (part.elems == 0) continue;
        pieces.push_back({.matrix = &batch[i], .number = static_cast<int64_t>(i), .part = part, .at = elems});
        elems += round_up(part.elems, kParamAlign);
    }
}
