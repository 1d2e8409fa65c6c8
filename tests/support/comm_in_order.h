// A communicator for deferred streams. Ranks may wait for their streams at different times (rank 0 alone draws a
// sample), but all must execute collectives in the order of the calls: each first executes the deferred ones before it.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "llmc/parallel/comm/comm.h"
#include "tests/support/deferred_stream.h"

template <typename Inner> class InOrder : public Inner {
public:
    using Inner::Inner;

    // Collectives of subgroups are in the same order as these.
    std::unique_ptr<Comm> subgroup(const std::vector<int>& members) override {
        std::unique_ptr<Comm> group = Inner::subgroup(members);
        dynamic_cast<InOrder&>(*group).order_ = order_;
        return group;
    }

    std::vector<std::string> gather(const std::string& mine) override {
        cpu::event_wait(order_->put_off);
        return Inner::gather(mine);
    }
    void sum(Ctx& ctx, Tensor values) override {
        in_order(ctx, [=, this, &ctx] { Inner::sum(ctx, values); });
    }
    void max(Ctx& ctx, uint32_t* values, int64_t count) override {
        in_order(ctx, [=, this, &ctx] { Inner::max(ctx, values, count); });
    }
    void reduce_scatter(Ctx& ctx, Tensor shards) override {
        in_order(ctx, [=, this, &ctx] { Inner::reduce_scatter(ctx, shards); });
    }
    void all_gather(Ctx& ctx, Tensor shards) override {
        in_order(ctx, [=, this, &ctx] { Inner::all_gather(ctx, shards); });
    }
    void all_to_all(Ctx& ctx, Tensor out, Tensor in) override {
        in_order(ctx, [=, this, &ctx] { Inner::all_to_all(ctx, out, in); });
    }
    void exchange(Ctx& ctx, Tensor out, Tensor in, int peer) override {
        in_order(ctx, [=, this, &ctx] { Inner::exchange(ctx, out, in, peer); });
    }
    void exchange_all(Ctx& ctx, Tensor out, Tensor in, const Counts& received, const Counts& sent) override {
        in_order(ctx, [=, this, &ctx] { Inner::exchange_all(ctx, out, in, received, sent); });
    }

private:
    template <typename Work> void in_order(Ctx& ctx, Work&& work) {
        if (cpu::deferred_stream(ctx) != order_->stream) cpu::event_wait(order_->put_off);
        order_->stream = cpu::deferred_stream(ctx);
        if (!order_->stream) return work();
        cpu::put_off(ctx, [work, &ctx, purpose = std::string(ctx.purpose ? ctx.purpose : "none")] {
            const CollectivePurpose same(ctx, purpose);
            work();
        });
        cpu::event_record(ctx, order_->put_off);
    }

    struct Order {
        ~Order() { cpu::event_destroy(put_off); }
        Event* const put_off = cpu::event_create();   // after the latest collective
        cpu::DeferredStream* stream = nullptr;        // of that event
    };
    std::shared_ptr<Order> order_ = std::make_shared<Order>();
};
