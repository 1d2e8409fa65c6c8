#include "llmc/parallel/zero.h"

#include <climits>

#include "llmc/fault/heartbeat.h"

Zero::Zero(const Config& config, const ParamTable& table, const Buckets& buckets, const FlatState& state, Comm& comm,
           Fp8State& fp8, Arena& arena)
    : config_(config), table_(table), buckets_(buckets), state_(state), comm_(comm), fp8_(fp8),
      sharded_(config.zero == 1 && buckets.ranks() > 1), overlap_(config.overlap && buckets.ranks() > 1),
      pieces_(config.zero == 1 ? buckets.pieces(comm.world().rank) : buckets.whole_pieces()),
      pieces_of_(buckets.all().size()), next_weights_(buckets.all().size()) {
    for (const Piece& piece : pieces_) pieces_of_[static_cast<size_t>(piece.bucket)].push_back(piece);
    forget_collected();
    if (!several()) return;
    CHECK(state.master.dtype == Dtype::kFp32, "%d ranks with masters in %s", buckets.ranks(),
          dtype_name(state.master.dtype));
    take_staging(arena);
    if (!sharded_ || fp8.gathers_bytes()) return;
    int64_t longest = 0;
    for (const Bucket& bucket : buckets.all())
        if (bucket.kind == BucketKind::kFp8Linears) longest = std::max(longest, bucket.elems);
    if (longest > 0) rounded_ = arena.take(Purpose::kComm, Dtype::kBf16, longest);
}

Zero::~Zero() {
    if (!opened_) return;
    for (Event* event : published_) device::event_destroy(event);
    device::event_destroy(ready_);
    device::event_destroy(reduced_);
    device::side_close(side_);
}

// ---- streams

// What collectives of buckets run on. A rehearsal opens nothing.
Ctx& Zero::comm_stream(Ctx& ctx) {
    if (!overlap_ || ctx.rehearsal) return ctx;
    if (!opened_) {
        device::side_open(side_, ctx);
        opened_ = true;
        ready_ = device::event_create();
        reduced_ = device::event_create();
        for (size_t b = 0; b < buckets_.all().size(); b++) published_.push_back(device::event_create());
    }
    side_.timer = ctx.timer;
    return side_;
}

// What is given to the comm stream from now on finds what ctx was given before.
void Zero::follow(Ctx& ctx, Ctx& comm_stream) {
    if (&comm_stream == &ctx) return;
    device::event_record(ctx, ready_);
    device::event_order(comm_stream, ready_);
}

void Zero::begin_step(CommTimer* timer) {
    timer_ = timer;
    if (timer_) timer_->restart();
}

// "reduce layers.3 to layers.5", for messages.
std::string Zero::purpose_text(const char* verb, const Bucket& bucket) const {
    auto layer_text = [&](int layer) -> std::string {
        if (layer < 0) return "embedding";
        return layer < config_.shape.num_layers ? strf("layers.%d", layer) : "head";
    };
    const bool one = bucket.first_layer == bucket.last_layer;
    return strf("%s %s", verb, layer_text(bucket.first_layer).c_str())
           + (one ? "" : " to " + layer_text(bucket.last_layer));
}

// ---- gradients; how a bucket is reduced is in zero_reduce.cpp

void Zero::reduce_next_backward(Ctx& ctx, bool compare) {
    if (!several()) return;
    reducing_ = true;
    reduced_buckets_ = 0;
    comparing_ = compare && report_;
    if (comparing_) device::fill_bytes(ctx, report_.data, 0, report_.bytes());
}

void Zero::grads_ready(Ctx& ctx, int layer) {
    if (!reducing_) return;
    bool first = true;
    for (const Bucket& bucket : buckets_.all()) {
        if (bucket.first_layer != layer) continue;
        Ctx& comm_stream = this->comm_stream(ctx);
        if (first) follow(ctx, comm_stream);
        first = false;
        const CollectivePurpose purpose(purpose_text("reduce", bucket));
        reduce_bucket(comm_stream, bucket);
        reduced_buckets_++;
    }
}

void Zero::finish_reduce(Ctx& ctx) {
    if (!several()) return;
    CHECK(reduced_buckets_ == buckets_.all().size(), "%zu of %zu buckets were reduced", reduced_buckets_,
          buckets_.all().size());
    reducing_ = false;
    if (!opened_) return;
    device::event_record(side_, reduced_);
    timed(ctx, [&] { device::event_order(ctx, reduced_); });
}

// This rank's block of a bucket, in a buffer that has the whole of all buckets.
Tensor Zero::own_block(const Bucket& bucket, const Tensor& whole) const {
    const int64_t block = buckets_.block_elems(bucket);
    return whole.slice(bucket.begin + comm_.world().rank * block, block);
}

Tensor Zero::own_sum(const Bucket& bucket) const {
    if (!state_.reduced) return own_block(bucket, state_.grads);
    if (!sharded_) return own_block(bucket, state_.reduced);
    return state_.reduced.slice(bucket.begin / buckets_.ranks(), buckets_.block_elems(bucket));
}

Tensor Zero::reduced(const Piece& piece) const {
    if (state_.reduced) return state_.reduced.slice(piece.shard, piece.elems);
    return state_.grads.slice(table_.params[static_cast<size_t>(piece.param)].offset + piece.begin, piece.elems);
}

// A sum over them depends on the cut, so that is the same with --zero 0. One rank needs none.
std::vector<Tensor> Zero::own_gradients() const {
    if (!several()) return {state_.grads};
    std::vector<Tensor> blocks;
    for (const Bucket& bucket : buckets_.all()) blocks.push_back(own_sum(bucket));
    return blocks;
}

void Zero::sum_over_ranks(Ctx& ctx, StepState* state) {
    static_assert(offsetof(StepState, sum_squares) == offsetof(StepState, loss_sum) + sizeof(double));
    if (!several()) return;
    const CollectivePurpose purpose("loss and gradient norm");
    timed(ctx, [&] {
        comm_.sum(ctx, {&state->loss_sum, Dtype::kFp64, 2});
        comm_.sum(ctx, {&state->bad_tokens, Dtype::kInt32, 1});
    });
}

void Zero::agree_on_amaxes(Ctx& ctx) {
    const Fp8State::Shared shared = fp8_.shared();
    const CollectivePurpose purpose("amaxes");
    if (several() && shared.count > 0) timed(ctx, [&] { comm_.max(ctx, shared.values, shared.count); });
}

// ---- weights

void Zero::publish(Ctx& ctx, const StepState* state) {
    CHECK(next_weights_ == buckets_.all().size(), "weights are on their way already");
    Ctx& comm_stream = sharded_ ? this->comm_stream(ctx) : ctx;
    if (fp8_.gathers_bytes()) fp8_.prepare_runs(ctx, state);
    follow(ctx, comm_stream);
    const bool beside = &comm_stream != &ctx;
    for (size_t b = 0; b < buckets_.all().size(); b++) {   // ascending layers
        const CollectivePurpose purpose(purpose_text("gather", buckets_.all()[b]));
        publish_bucket(comm_stream, static_cast<int>(b), state);
        if (beside) device::event_record(comm_stream, published_[b]);
    }
    if (beside) next_weights_ = 0;
}

void Zero::publish_bucket(Ctx& comm_stream, int b, const StepState* state) {
    const Bucket& bucket = buckets_.all()[static_cast<size_t>(b)];
    if (bucket.kind == BucketKind::kFp8Linears && fp8_.gathers_bytes()) return gather_bytes(comm_stream, b);
    Tensor whole;   // as gathered, in bf16; a rank that has all masters takes those
    if (sharded_ && bucket.kind == BucketKind::kFp8Linears) {
        whole = rounded_.slice(0, bucket.elems);
        round_masters(comm_stream, b, whole);
    } else if (sharded_) {
        whole = state_.weights.slice(bucket.weight_begin, bucket.elems);
    }
    if (whole) timed(comm_stream, [&] { comm_.all_gather(comm_stream, whole); });
    for (int param : bucket.params) {
        const Fp8Linear* linear = fp8_.linear_of_param(param);
        if (!linear) continue;
        const int64_t offset = table_.params[static_cast<size_t>(param)].offset, elems = linear->in * linear->out;
        const Tensor from = whole ? whole.slice(offset - bucket.begin, elems) : state_.master.slice(offset, elems);
        fp8_.quantize_weight(comm_stream, *linear, from, state);
    }
}

// Into this rank's block of a whole bucket in bf16.
void Zero::round_masters(Ctx& ctx, int bucket, const Tensor& whole) {
    const int64_t begin = buckets_.all()[static_cast<size_t>(bucket)].begin;
    for (const Piece& piece : pieces_of_[static_cast<size_t>(bucket)]) {
        const int64_t offset = table_.params[static_cast<size_t>(piece.param)].offset + piece.begin;
        ops::cast(ctx, {.out = whole.slice(offset - begin, piece.elems), .in = master(piece)});
    }
}

void Zero::gather_bytes(Ctx& comm_stream, int b) {
    const Bucket& bucket = buckets_.all()[static_cast<size_t>(b)];
    for (const Piece& piece : pieces_of_[static_cast<size_t>(b)])
        fp8_.quantize_run(comm_stream, piece.param, piece.begin, master(piece));
    timed(comm_stream, [&] {
        comm_.all_gather(comm_stream, fp8_.flat_weights().slice(bucket.weight_begin, bucket.elems));
    });
    for (int param : bucket.params) fp8_.transpose_weight(comm_stream, *fp8_.linear_of_param(param));
}

void Zero::before_layer(Ctx& ctx, int layer) {
    const std::vector<Bucket>& all = buckets_.all();
    const size_t before = next_weights_;
    while (next_weights_ < all.size() && all[next_weights_].first_layer <= layer) next_weights_++;
    if (next_weights_ == before) return;
    timed(ctx, [&] { device::event_order(ctx, published_[next_weights_ - 1]); });
}

void Zero::wait_for_weights(Ctx& ctx) { before_layer(ctx, INT_MAX); }

// ---- for checkpoints and reports

void Zero::collect_weight(Ctx& ctx, int param) {
    const int b = buckets_.bucket_of(param);
    const Bucket& bucket = buckets_.of_param(param);
    if (!sharded_ || bucket.kind != BucketKind::kFp8Linears || collected_[static_cast<size_t>(b)]) return;
    const CollectivePurpose purpose(purpose_text("collect", bucket));
    round_masters(ctx, b, collecting(bucket));
    comm_.all_gather(ctx, collecting(bucket));
    collected_[static_cast<size_t>(b)] = true;
}

Tensor Zero::collected_weight(int param) const {
    const Bucket& bucket = buckets_.of_param(param);
    const Param& p = table_.params[static_cast<size_t>(param)];
    CHECK(collected_[static_cast<size_t>(buckets_.bucket_of(param))], "%s was not collected", p.name.c_str());
    return collecting(bucket).slice(p.offset - bucket.begin, p.elems());
}

void Zero::copy_report(Ctx& ctx, void* host) const {
    if (report_) device::copy_to_host(ctx, host, report_.data, report_bytes());
}
