#include "llmc/train/orthogonalizer.h"

#include <cmath>
#include <set>

namespace {

// Muon's memory is that of activations, which are not in use; the table counts what it takes beyond them as moments.
constexpr Purpose kPurpose = Purpose::kMoments;

// Its elements in a batch and in a message.
Tensor in_batch(const Tensor& batch, const MatrixOwners::Piece& piece) {
    return batch.slice(piece.in_batch(), piece.part.elems);
}
Tensor in_message(const Tensor& message, const MatrixOwners::Piece& piece) {
    return message.slice(piece.at, piece.part.elems);
}

}  // namespace

Orthogonalizer::Orthogonalizer(const Config& config, const ParamTable& table, const ShardedState& state,
                               const Gradients& grads, Comm& group, int parts, CommStream& stream, Arena& arena)
    : state_(state), grads_(grads), group_(group), stream_(stream), dtype_(config.dtype),
      beta2_(config.muon_beta2),
      owners_(table, state.buckets(), group_.world().ranks, state.sharded() ? state.buckets().ranks() / parts : 1,
              parts),
      send_(arena.take(kPurpose, dtype_, owners_.ranks() * owners_.longest())),
      receive_(arena.take(kPurpose, dtype_, send_.elems)),
      buffers_(arena, kPurpose, dtype_, {owners_.most_elems(), owners_.most_squares(), owners_.most_matrices()}),
      new_rows_(arena.take(kPurpose, rows().dtype, rows().elems)) {}

// While a round is computed, an exchange brings the matrices of the next one and takes away the results of the one
// before.
void Orthogonalizer::run(Ctx& ctx, const StepState* state) {
    Ctx& comm = stream_.comm_ctx(ctx);
    if (beta2_ > 0) device::fill_bytes(ctx, new_rows_.data, 0, new_rows_.bytes());
    Tensor result;   // of the round before
    pack(ctx, 0, result);
    start(ctx, comm, 0);
    for (size_t exchange = 0; exchange < owners_.exchanges(); exchange++) {
        const bool last = exchange + 1 == owners_.exchanges();
        wait(ctx, comm);   // also before send_ and receive_ change, after the last one by other users of their memory
        if (!last) pack(ctx, exchange + 1, result);
        unpack(ctx, exchange);
        if (!last) start(ctx, comm, exchange + 1);
        const Batch& mine = owners_.batch(exchange, rank());
        result = mine.empty() ? Tensor{} : compute(ctx, mine, state);
    }
    if (beta2_ == 0) return;
    // Only the owner of a matrix knows the new moments of its rows; adding zeros to them is exact.
    if (owners_.ranks() > 1) stream_.timed(ctx, [&] { group_.sum(ctx, new_rows_); });
    device::copy_on_device(ctx, rows().data, new_rows_.data, new_rows_.bytes());
}

std::vector<Tensor> Orthogonalizer::exchanged() const {
    if (!send_) return {};
    return {send_, receive_};
}

void Orthogonalizer::pack(Ctx& ctx, size_t exchange, const Tensor& result) {
    for (int r = 0; r < owners_.ranks(); r++) {
        const Message message = owners_.message(exchange, rank(), r);
        if (r == rank()) {
            for (const Piece& piece : message.results)
                ops::cast(ctx, {.out = held_update(*piece.matrix), .in = in_batch(result, piece)});
            continue;
        }
        const Tensor to = shard(send_, exchange, r);
        for (const Piece& piece : message.matrices)
            ops::cast(ctx, {.out = in_message(to, piece), .in = held_update(*piece.matrix)});
        for (const Piece& piece : message.results)
            ops::cast(ctx, {.out = in_message(to, piece), .in = in_batch(result, piece)});
    }
}

void Orthogonalizer::unpack(Ctx& ctx, size_t exchange) {
    for (int r = 0; r < owners_.ranks(); r++) {
        const Message message = owners_.message(exchange, r, rank());
        const Tensor from = r == rank() ? Tensor{} : shard(receive_, exchange, r);
        for (const Piece& piece : message.matrices)
            ops::cast(ctx, {.out = in_batch(buffers_.x, piece),
                            .in = from ? in_message(from, piece) : held_update(*piece.matrix)});
        if (!from) continue;
        for (const Piece& piece : message.results)
            ops::cast(ctx, {.out = held_update(*piece.matrix), .in = in_message(from, piece)});
    }
}

void Orthogonalizer::start(Ctx& ctx, Ctx& comm, size_t exchange) {
    if (owners_.longest(exchange) == 0) return;
    const CollectivePurpose purpose(comm, strf("Muon's matrices %zu", exchange));
    Counts received, sent;
    for (int r = 0; r < owners_.ranks(); r++) {
        received.push_back(r == rank() ? 0 : owners_.message(exchange, r, rank()).elems);
        sent.push_back(r == rank() ? 0 : owners_.message(exchange, rank(), r).elems);
    }
    const int64_t elems = owners_.ranks() * owners_.longest(exchange);
    stream_.wait_for_compute(ctx, comm);
    stream_.timed(comm, [&] {
        group_.exchange_all(comm, receive_.slice(0, elems), send_.slice(0, elems), received, sent);
    });
    if (&comm == &ctx) return;
    if (!done_) done_ = OwnedEvent::create();
    number_ = stream_.record(comm, done_);
}

void Orthogonalizer::wait(Ctx& ctx, Ctx& comm) {
    if (&comm != &ctx && done_) stream_.order_after(ctx, done_, number_);
}

Tensor Orthogonalizer::compute(Ctx& ctx, const Batch& mine, const StepState* state) {
    const Tensor results = polar_factors(ctx, mine);
    if (beta2_ > 0) normalize_rows(ctx, mine, results, state);
    if (results.data == buffers_.other.data) std::swap(buffers_.x, buffers_.other);
    return results;
}

Tensor Orthogonalizer::polar_factors(Ctx& ctx, const Batch& mine) const {
    const OwnedMatrix& one = mine.front();
    return newton_schulz(ctx, buffers_, one.in_batches() ? static_cast<int64_t>(mine.size()) : 0, one.rows, one.cols);
}

// Each result gets the Frobenius norm of a matrix whose singular values are 1, the root of the shorter side.
void Orthogonalizer::normalize_rows(Ctx& ctx, const Batch& batch, const Tensor& results, const StepState* state) {
    int64_t begin = 0;
    for (const OwnedMatrix& matrix : batch) {
        const int64_t first = state_.row_begin(matrix.param) + matrix.begin / matrix.cols;
        ops::muon_row_norm(ctx, {.matrix = results.slice(begin, matrix.elems()), .v = rows().slice(first, matrix.rows),
                                 .new_v = new_rows_.slice(first, matrix.rows), .state = state, .rows = matrix.rows,
                                 .cols = matrix.cols, .beta2 = beta2_});
        begin += matrix.elems();
    }
    const auto shorter = static_cast<double>(std::min(batch[0].rows, batch[0].cols));
    normalize_matrices(ctx, buffers_, results, static_cast<int64_t>(batch.size()), 1 / std::sqrt(shorter));
}

void Orthogonalizer::warm_up(Ctx& ctx) {
    std::set<std::pair<int64_t, int64_t>> shapes;
    for (size_t round = 0; round < owners_.rounds(); round++) {
        const Batch& mine = owners_.batch(round, rank());
        if (mine.empty() || !shapes.insert({mine[0].rows, mine[0].cols}).second) continue;
        device::fill_bytes(ctx, buffers_.x.data, 0, buffers_.x.bytes());
        polar_factors(ctx, mine);
    }
}

// The updates that this rank holds of a matrix, in the memory of gradients.
Tensor Orthogonalizer::held_update(const OwnedMatrix& matrix) const {
    const MatrixPart part = owners_.held(matrix, owners_.shard_of(rank()));
    const ShardRange& range = *state_.range_of(matrix.param);
    return grads_.reduced(range).slice(matrix.begin + part.begin - range.begin, part.elems);
}
