#include "llmc/train/orthogonalizer.h"

#include <cmath>
#include <set>

namespace {

// Muon's memory is that of activations, which are not in use; the table counts what it takes beyond them as moments.
constexpr Purpose kPurpose = Purpose::kMoments;

Tensor in_matrix(const Tensor& whole, const MatrixPart& part) { return whole.slice(part.begin, part.elems); }

}  // namespace

Orthogonalizer::Orthogonalizer(const Config& config, const ParamTable& table, const ShardedState& state,
                               const Gradients& grads, const Groups& groups, CommStream& stream, Arena& arena)
    : state_(state), grads_(grads), world_(groups.world), stream_(stream), dtype_(config.dtype),
      beta2_(config.muon_beta2),
      owners_(table, state.buckets(), world_.world().ranks, state.sharded() ? state.buckets().ranks() : 1),
      staging_(arena.take(kPurpose, dtype_, owners_.ranks() > 1 ? owners_.most_held() : 0)),
      buffers_(arena, kPurpose, dtype_, owners_.most_elems(), owners_.most_side()),
      next_(arena.take(kPurpose, dtype_, owners_.most_elems())),
      new_rows_(arena.take(kPurpose, rows().dtype, rows().elems)) {}

// What ranks send is on the comm stream in this order: 0 to owners, 1 to owners, 0 back, 2 to owners, 1 back, ... While
// a round is computed, the results of the round before leave, and then the next matrices arrive in their memory.
void Orthogonalizer::run(Ctx& ctx, const StepState* state) {
    Ctx& comm = stream_.comm_ctx(ctx);
    if (beta2_ > 0) device::fill_bytes(ctx, new_rows_.data, 0, new_rows_.bytes());
    stream_.wait_for_compute(ctx, comm);
    send_to_owners(comm, 0);
    int64_t arrival = mark(ctx, comm);
    for (size_t round = 0; round < owners_.rounds(); round++) {
        const OwnedMatrix* mine = owners_.matrix(round, rank());
        std::swap(buffers_.x, next_);
        if (mine) wait_for(ctx, comm, arrival);
        send_to_owners(comm, round + 1);
        arrival = mark(ctx, comm);   // the results that are sent next need not be there before the next round begins
        const Tensor result = mine ? compute(ctx, *mine, state) : Tensor{};
        if (mine) stream_.wait_for_compute(ctx, comm);
        send_back(comm, round, result);
    }
    wait_for(ctx, comm, mark(ctx, comm));
    if (beta2_ == 0) return;
    // Only the owner of a matrix knows the new moments of its rows; adding zeros to them is exact.
    if (owners_.ranks() > 1) stream_.timed(ctx, [&] { world_.sum(ctx, new_rows_); });
    device::copy_on_device(ctx, rows().data, new_rows_.data, new_rows_.bytes());
}

int64_t Orthogonalizer::mark(Ctx& ctx, Ctx& comm) {
    if (&comm == &ctx) return 0;
    if (!done_) done_ = OwnedEvent::create();
    return stream_.record(comm, done_);
}

void Orthogonalizer::wait_for(Ctx& ctx, Ctx& comm, int64_t mark) {
    if (&comm != &ctx) stream_.order_after(ctx, done_, mark);
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

template <typename Use> void Orthogonalizer::each_held(size_t round, Use&& use) const {
    int64_t at = 0;
    for (int r = 0; r < owners_.ranks(); r++) {
        const OwnedMatrix* matrix = owners_.matrix(round, r);
        const MatrixPart part = matrix ? owners_.held(*matrix, owners_.shard_of(rank())) : MatrixPart{};
        if (part.elems == 0) continue;
        use(*matrix, part, r, r == rank() ? Tensor{} : staging_.slice(at, part.elems));
        if (r != rank()) at += round_up(part.elems, kParamAlign);
    }
}

std::vector<Tensor> Orthogonalizer::none() const {
    return std::vector<Tensor>(static_cast<size_t>(owners_.ranks()), Tensor{nullptr, dtype_, 0});
}

void Orthogonalizer::exchange(Ctx& comm, const std::vector<Tensor>& out, const std::vector<Tensor>& in) {
    if (owners_.ranks() > 1) stream_.timed(comm, [&] { world_.exchange_all(comm, out, in); });
}

void Orthogonalizer::send_to_owners(Ctx& comm, size_t round) {
    if (round == owners_.rounds()) return;
    const CollectivePurpose purpose(comm, strf("Muon's matrices %zu to owners", round));
    std::vector<Tensor> sent = none(), arriving = none();
    each_held(round, [&](const OwnedMatrix& matrix, const MatrixPart& part, int r, const Tensor& staging) {
        if (owners_.holder(owners_.shard_of(rank()), r) != rank()) return;   // the owner takes it from its own copy
        const Tensor to = r == rank() ? in_matrix(next_, part) : staging;
        ops::cast(comm, {.out = to, .in = held_update(matrix)});
        if (r != rank()) sent[static_cast<size_t>(r)] = to;
    });
    const OwnedMatrix* mine = owners_.matrix(round, rank());
    for (int shard = 0; mine && shard < owners_.shards(); shard++)
        if (const int holder = owners_.holder(shard, rank()); holder != rank())
            arriving[static_cast<size_t>(holder)] = in_matrix(next_, owners_.held(*mine, shard));
    exchange(comm, arriving, sent);
}

void Orthogonalizer::send_back(Ctx& comm, size_t round, const Tensor& result) {
    const CollectivePurpose purpose(comm, strf("Muon's matrices %zu from owners", round));
    std::vector<Tensor> sent = none(), arriving = none();
    for (int r = 0; result && r < owners_.ranks(); r++)
        if (r != rank())
            sent[static_cast<size_t>(r)] =
                in_matrix(result, owners_.held(*owners_.matrix(round, rank()), owners_.shard_of(r)));
    each_held(round, [&](const OwnedMatrix&, const MatrixPart&, int r, const Tensor& staging) {
        if (r != rank()) arriving[static_cast<size_t>(r)] = staging;
    });
    exchange(comm, arriving, sent);
    each_held(round, [&](const OwnedMatrix& matrix, const MatrixPart& part, int r, const Tensor& staging) {
        ops::cast(comm, {.out = held_update(matrix), .in = r == rank() ? in_matrix(result, part) : staging});
    });
}
