// Deferred streams of the CPU execute their work in order, when something waits for it and no earlier.
// test_zero_streams.cpp uses them in training.
#include "tests/support/local_ranks.h"

#include "llmc/ops/ops.h"
#include "tests/support/doctest.h"

namespace streams_test {

namespace {

// Two streams over a few integers: the first or the second is deferred.
struct Pair {
    explicit Pair(bool first_deferred, int64_t* orders = nullptr) {
        cpu::device_open(compute, 0);
        cpu::count_orders(compute, orders);
        if (first_deferred) cpu::defer(compute);
        cpu::side_open(side, compute);
    }
    ~Pair() {
        for (Event* event : {a, b}) cpu::event_destroy(event);
        cpu::side_close(side);
        cpu::device_close(compute);
    }
    Pair(const Pair&) = delete;
    void put(Ctx& ctx, int i, int value) { cpu::fill_bytes(ctx, &bytes[i], value, 1); }

    Ctx compute, side;
    Event *a = cpu::event_create(), *b = cpu::event_create();
    char bytes[4] = {};
};

}  // namespace

TEST_CASE("streams: deferred work runs in order up to the event that is waited for") {
    for (bool first_deferred : {false, true}) {
        CAPTURE(first_deferred);
        Pair p(first_deferred);
        Ctx &deferred = first_deferred ? p.compute : p.side, &other = first_deferred ? p.side : p.compute;
        p.put(deferred, 0, 1);
        p.put(other, 3, 9);
        CHECK(p.bytes[3] == 9);
        cpu::event_record(deferred, p.a);
        cpu::copy_on_device(deferred, &p.bytes[1], &p.bytes[0], 1);
        p.put(deferred, 0, 2);
        cpu::event_record(deferred, p.b);
        cpu::copy_to_host(deferred, &p.bytes[2], &p.bytes[0], 1);
        cpu::event_order(deferred, p.b);   // the same stream: nothing to wait for
        CHECK(!cpu::event_reached(p.a));
        CHECK(std::string(p.bytes, 3) == std::string(3, '\0'));
        cpu::event_order(other, p.a);
        CHECK(cpu::event_reached(p.a));
        CHECK(!cpu::event_reached(p.b));
        CHECK(std::string(p.bytes, 3) == std::string("\1\0\0", 3));
        cpu::event_wait(p.b);
        CHECK(std::string(p.bytes, 3) == std::string("\2\1\0", 3));
        CHECK(cpu::event_elapsed_ms(p.a, p.b) >= 0);
        cpu::synchronize(deferred);
        CHECK(std::string(p.bytes, 3) == "\2\1\2");
        cpu::event_wait(p.a);   // reached long ago
        p.put(deferred, 0, 7);
        cpu::event_record(deferred, p.a);   // anew
        CHECK(!cpu::event_reached(p.a));
        cpu::event_wait(p.a);
        CHECK(p.bytes[0] == 7);
    }
}

// Records the purposes of sums.
class NotingComm : public LocalExchange {
public:
    using LocalExchange::LocalExchange;
    void sum(Ctx& ctx, Tensor values) override {
        purposes.push_back(ctx.purpose ? ctx.purpose : "none");
        LocalExchange::sum(ctx, values);
    }
    std::vector<std::string> purposes;
};

TEST_CASE("streams: collectives keep the order of the calls and their purpose, wherever a rank waits") {
    if (!device::device_info(-1).toolkit.empty()) return;   // NCCL keeps the order there
    const auto ends = run_ranks(3, [](LocalComm& ranks) {
        InOrder<NotingComm> comm(ranks.all(), ranks.world().rank);
        const bool root = comm.root();
        int32_t one = 1, two = 2, three = 3;
        auto sum = [&comm](Ctx& ctx, int32_t& value) { comm.sum(ctx, {&value, Dtype::kInt32, 1}); };
        Pair p(false);
        {
            const CollectivePurpose purpose(p.side, "first");
            sum(p.side, one);
        }
        p.put(p.side, 0, 5);
        CHECK(one == 1);
        if (root) cpu::synchronize(p.side);   // only this rank, as when it draws a sample
        const CollectivePurpose purpose(p.side, "second");
        comm.gather("");
        CHECK(one == 3);
        CHECK(p.bytes[0] == (root ? 5 : 0));   // runs after the collective, because nothing waits for it earlier
        sum(p.side, two);
        sum(p.side, three);
        CHECK(two == 2);
        if (root) cpu::synchronize(p.side);
        const CollectivePurpose third(p.compute, "third");
        sum(p.compute, one);
        CHECK(two == 6);
        CHECK(three == 9);
        CHECK(one == 9);
        CHECK(comm.purposes == std::vector<std::string>{"first", "second", "second", "third"});
    });
    CHECK(ends == std::vector<std::string>(3, "nothing"));
}

}  // namespace streams_test
