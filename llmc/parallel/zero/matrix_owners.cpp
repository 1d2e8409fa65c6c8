#include "llmc/parallel/zero/matrix_owners.h"

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
    : ranks_(ranks), matrices_(assign_owners(table, ranks, parts)), of_rank_(static_cast<size_t>(ranks)),
      held_(static_cast<size_t>(shards), std::vector<MatrixPart>(table.params.size())) {
    CHECK(ranks % shards == 0 && (shards == 1 || shards * parts == buckets.ranks()), "%d shards on %d ranks", shards,
          ranks);
    for (size_t m = 0; m < matrices_.size(); m++) {
        std::vector<int>& mine = of_rank_[static_cast<size_t>(matrices_[m].owner)];
        mine.push_back(static_cast<int>(m));
        rounds_ = std::max(rounds_, mine.size());
        most_elems_ = std::max(most_elems_, matrices_[m].elems());
        most_side_ = std::max(most_side_, std::min(matrices_[m].rows, matrices_[m].cols));
    }
    const Buckets whole(buckets.layout(), 1);
    for (int shard = 0; shard < shards; shard++)
        for (const ShardRange& range : (shards == 1 ? whole : buckets).shard_ranges(shards == 1 ? 0 : shard * parts))
            held_[static_cast<size_t>(shard)][static_cast<size_t>(range.param)] = {range.begin, range.elems};
    for (size_t exchange = 0; exchange < exchanges(); exchange++) {
        longest_.push_back(0);
        for (int from = 0; from < ranks; from++)
            for (int to = 0; to < ranks; to++)
                if (from != to) longest_.back() = std::max(longest_.back(), message(exchange, from, to).elems());
    }
}

const OwnedMatrix* MatrixOwners::matrix(size_t round, int rank) const {
    const std::vector<int>& mine = of_rank_[static_cast<size_t>(rank)];
    return round < mine.size() ? &matrices_[static_cast<size_t>(mine[round])] : nullptr;
}

MatrixPart MatrixOwners::held(const OwnedMatrix& matrix, int shard) const {
    const MatrixPart& all = held_[static_cast<size_t>(shard)][static_cast<size_t>(matrix.param)];
    const int64_t begin = std::max(all.begin, matrix.begin);
    const int64_t end = std::min(all.begin + all.elems, matrix.begin + matrix.elems());
    return begin < end ? MatrixPart{begin - matrix.begin, end - begin} : MatrixPart{};
}

MatrixOwners::Message MatrixOwners::message(size_t exchange, int from, int to) const {
    Message message;
    const OwnedMatrix* const theirs = exchange < rounds_ ? matrix(exchange, to) : nullptr;
    const OwnedMatrix* const done = exchange >= 2 ? matrix(exchange - 2, from) : nullptr;
    if (theirs && holder(shard_of(from), to) == from) message.part = held(*theirs, shard_of(from));
    if (done) message.result_part = held(*done, shard_of(to));
    if (message.part.elems > 0) message.matrix = theirs;
    if (message.result_part.elems > 0) message.result = done;
    return message;
}
