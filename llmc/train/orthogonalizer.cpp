#include "llmc/train/orthogonalizer.h"

#include <cmath>
#include <set>

namespace {

// Muon's memory is that of activations, which are not in use; the table counts what it takes beyond them as moments.
constexpr Purpose kPurpose = Purpose::kMoments;

Tensor in_matrix(const Tensor& whole, const MatrixPart& part) { return whole.slice(part.begin, part.elems); }

}  // namespace

Orthogonalizer::Orthogonalizer(const Config& config, const ParamTable& table, const ShardedState& state,
                               const Gradients& grads, Comm& group, int parts, CommStream& stream, Arena& arena)
    : state_(state), grads_(grads), group_(group), stream_(stream), dtype_(config.dtype),
      beta2_(config.muon_beta2),
      owners_(table, state.buckets(), group_.world().ranks, state.sharded() ? state.buckets().ranks() / parts : 1,
              parts),
      send_(arena.take(kPurpose, dtype_, owners_.ranks() * owners_.longest())),
      receive_(arena.take(kPurpose, dtype_, send_.elems)),
      buffers_(arena, kPurpose, dtype_, owners_.most_elems(), owners_.most_side()),
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
        if (!last || moves_) wait(ctx, comm);   // before send_ changes, too: after the last one by activations
        if (!last) pack(ctx, exchange + 1, result);
        unpack(ctx, exchange);
        if (!last) start(ctx, comm, exchange + 1);
        const OwnedMatrix* mine = exchange < owners_.rounds() ? owners_.matrix(exchange, rank()) : nullptr;
        result = mine ? compute(ctx, *mine, state) : Tensor{};
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
            if (message.result)
                ops::cast(ctx, {.out = held_update(*message.result), .in = in_matrix(result, message.result_part)});
            continue;
        }
        const Tensor to = shard(send_, exchange, r);
        if (message.matrix) ops::cast(ctx, {.out = to.slice(0, message.part.elems),
                                            .in = held_update(*message.matrix)});
        if (message.result) ops::cast(ctx, {.out = to.slice(message.result_at(), message.result_part.elems),
                                            .in = in_matrix(result, message.result_part)});
    }
}

void Orthogonalizer::unpack(Ctx& ctx, size_t exchange) {
    for (int r = 0; r < owners_.ranks(); r++) {
        const Message message = owners_.message(exchange, r, rank());
        const Tensor from = r == rank() ? Tensor{} : shard(receive_, exchange, r);
        if (message.matrix)
            ops::cast(ctx, {.out = in_matrix(buffers_.x, message.part),
                            .in = from ? from.slice(0, message.part.elems) : held_update(*message.matrix)});
        if (message.result && from)
            ops::cast(ctx, {.out = held_update(*message.result),
                            .in = from.slice(message.result_at(), message.result_part.elems)});
    }
}

void Orthogonalizer::start(Ctx& ctx, Ctx& comm, size_t exchange) {
    moves_ = false;
    if (owners_.longest(exchange) == 0) return;
    const CollectivePurpose purpose(comm, strf("Muon's matrices %zu", exchange));
    Counts received, sent;
    for (int r = 0; r < owners_.ranks(); r++) {
        received.push_back(r == rank() ? 0 : owners_.message(exchange, r, rank()).elems());
        sent.push_back(r == rank() ? 0 : owners_.message(exchange, rank(), r).elems());
    }
    for (const Counts& counts : {sent, received})
        moves_ = moves_ || *std::max_element(counts.begin(), counts.end()) > 0;
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

Tensor Orthogonalizer::compute(Ctx& ctx, const OwnedMatrix& mine, const StepState* state) {
    const Tensor result = newton_schulz(ctx, buffers_, mine.rows, mine.cols);
    if (beta2_ > 0) normalize_rows(ctx, mine, result, state);
    if (result.data == buffers_.other.data) std::swap(buffers_.x, buffers_.other);
    return result;
}

// The result gets the Frobenius norm of a matrix whose singular values are 1, the root of the shorter side.
void Orthogonalizer::normalize_rows(Ctx& ctx, const OwnedMatrix& matrix, const Tensor& result,
                                    const StepState* state) {
    const int64_t first = state_.row_begin(matrix.param) + matrix.begin / matrix.cols;
    ops::muon_row_norm(ctx, {.matrix = result, .v = rows().slice(first, matrix.rows),
                             .new_v = new_rows_.slice(first, matrix.rows), .state = state, .rows = matrix.rows,
                             .cols = matrix.cols, .beta2 = beta2_});
    const auto shorter = static_cast<double>(std::min(matrix.rows, matrix.cols));
    normalize_matrix(ctx, buffers_, result, 1 / std::sqrt(shorter));
}

void Orthogonalizer::warm_up(Ctx& ctx) {
    std::set<std::pair<int64_t, int64_t>> shapes;
    for (size_t round = 0; round < owners_.rounds(); round++) {
        const OwnedMatrix* mine = owners_.matrix(round, rank());
        if (!mine || !shapes.insert({mine->rows, mine->cols}).second) continue;
        device::fill_bytes(ctx, buffers_.x.data, 0, buffers_.x.bytes());
        newton_schulz(ctx, buffers_, mine->rows, mine->cols);
    }
}

// The updates that this rank holds of a matrix, in the memory of gradients.
Tensor Orthogonalizer::held_update(const OwnedMatrix& matrix) const {
    const MatrixPart part = owners_.held(matrix, owners_.shard_of(rank()));
    const ShardRange& range = *state_.range_of(matrix.param);
    return grads_.reduced(range).slice(matrix.begin + part.begin - range.begin, part.elems);
}
