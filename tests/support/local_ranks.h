// Several ranks as threads of one process: a Comm whose collectives copy between them. Results that a collective leaves
// undefined become NaN. On a GPU build all ranks share the first GPU.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "llmc/parallel/comm/comm.h"
#include "tests/support/deferred_stream.h"

// A communicator for deferred streams. Ranks may wait for their streams at different times (rank 0 alone draws a
// sample), but all must execute collectives in the order of the calls: each first executes the deferred ones before it.
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

class LocalExchange;
using LocalComm = InOrder<LocalExchange>;

class LocalRanks {
public:
    explicit LocalRanks(int ranks) : posted_(static_cast<size_t>(ranks)) {}
    bool defers_compute = false;   // for runs that open their device themselves; see cpu::defer

    // Runs body(comm) on a thread per rank; the first error ends all ranks and is thrown.
    void run(const std::function<void(Comm&)>& body);
    // The same, but returns the end of each rank: "nothing" or "exit 7: message".
    std::vector<std::string> errors(const std::function<void(LocalComm&)>& body);
    // Waits until all other ranks wait for this one, or one failed.
    void wait_for_the_others() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return waiting_ + 1 == posted_.size() || failed_; });
    }

private:
    friend class LocalExchange;
    // Each subgroup has its own LocalRanks, which the first of its ranks creates.
    LocalRanks& group(const std::vector<int>& members) {
        const std::lock_guard lock(mutex_);
        std::unique_ptr<LocalRanks>& group = groups_[members];
        if (!group) group = std::make_unique<LocalRanks>(static_cast<int>(members.size()));
        return *group;
    }
    // Waits for all ranks.
    void meet() {
        std::unique_lock lock(mutex_);
        const int64_t round = round_;
        if (++waiting_ == posted_.size()) {
            waiting_ = 0;
            round_++;
        }
        changed_.notify_all();
        changed_.wait(lock, [&] { return round_ != round || failed_; });
        if (round_ == round) throw Error(kExitPeerLost, "another rank failed");
    }
    void fail(const Error& error) {
        const std::lock_guard lock(mutex_);
        if (!failed_) first_ = error;
        failed_ = true;
        changed_.notify_all();
        for (auto& [members, group] : groups_) group->fail(error);
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    size_t waiting_ = 0;
    int64_t round_ = 0;
    bool failed_ = false;
    Error first_{kExitOk, ""};
    std::vector<const void*> posted_;   // by rank
    std::map<std::vector<int>, std::unique_ptr<LocalRanks>> groups_;   // by members
};

class LocalExchange : public Comm {
public:
    LocalExchange(LocalRanks& all, int rank)
        : Comm({.rank = rank, .ranks = static_cast<int>(all.posted_.size()), .local_rank = rank,
                .local_ranks = static_cast<int>(all.posted_.size()), .run_rank = rank}),
          all_(all) {}

    std::unique_ptr<Comm> subgroup(const std::vector<int>& members) override;
    std::string connect(Ctx& ctx, int) override {
        if (all_.defers_compute) cpu::defer(ctx);
        return "";
    }

    std::vector<std::string> gather(const std::string& mine) override {
        post(&mine);
        std::vector<std::string> texts;
        for (const void* text : all_.posted_) texts.push_back(*static_cast<const std::string*>(text));
        all_.meet();
        return texts;
    }
    void sum(Ctx& ctx, Tensor values) override {
        if (ctx.rehearsal) return;
        Bytes bytes = fetch(ctx, values);
        switch (values.dtype) {
            case Dtype::kFp64: reduce<double>(bytes, 0, values.elems, add<double>); break;
            case Dtype::kFp32: reduce<float>(bytes, 0, values.elems, add<float>); break;
            case Dtype::kInt32: reduce<int32_t>(bytes, 0, values.elems, add<int32_t>); break;
            default: throw Error(kExitBug, strf("sum of %s", dtype_name(values.dtype)));
        }
        store(ctx, values, bytes);
    }
    void max(Ctx& ctx, uint32_t* values, int64_t count) override {
        if (ctx.rehearsal) return;
        const Tensor tensor{values, Dtype::kInt32, count};
        Bytes bytes = fetch(ctx, tensor);
        reduce<uint32_t>(bytes, 0, count, [](uint32_t a, uint32_t b) { return std::max(a, b); });
        store(ctx, tensor, bytes);
    }
    void reduce_scatter(Ctx& ctx, Tensor shards) override {
        if (ctx.rehearsal) return;
        const int64_t shard = shards.elems / world().ranks, begin = world().rank * shard;
        Bytes bytes = fetch(ctx, shards);
        reduce<float>(bytes, begin, shard, add<float>);
        std::fill(bytes.begin(), bytes.begin() + begin * 4, '\xff');
        std::fill(bytes.begin() + (begin + shard) * 4, bytes.end(), '\xff');
        store(ctx, shards, bytes);
    }
    void all_gather(Ctx& ctx, Tensor shards) override {
        if (ctx.rehearsal) return;
        copy_shards(ctx, shards, shards, [](int from, int) { return from; });
    }
    void all_to_all(Ctx& ctx, Tensor out, Tensor in) override {
        if (ctx.rehearsal) return;
        copy_shards(ctx, out, in, [](int, int own) { return own; });
    }
    void exchange_shards(Ctx& ctx, Tensor out, Tensor in) override {
        all_to_all(ctx, out, in);
        if (ctx.rehearsal) return;
        const Tensor own = out.slice(world().rank * (out.elems / world().ranks), out.elems / world().ranks);
        device::fill_bytes(ctx, own.data, 0xff, own.bytes());
    }
    void exchange_all(Ctx& ctx, Tensor out, Tensor in, const Counts& received_elems, const Counts& sent) override {
        if (ctx.rehearsal) return;
        std::vector<Bytes> mine;
        for (int r = 0; r < world().ranks; r++) mine.push_back(fetch(ctx, first_of_shard(in, r, sent)));
        post(&mine);
        std::vector<Bytes> received;
        for (const void* theirs : all_.posted_)
            received.push_back((*static_cast<const std::vector<Bytes>*>(theirs)).at(static_cast<size_t>(world().rank)));
        all_.meet();
        for (int r = 0; r < world().ranks; r++) {
            const Tensor to = first_of_shard(out, r, received_elems);
            const Bytes& bytes = received[static_cast<size_t>(r)];
            if (r == world().rank) continue;
            if (bytes.size() != static_cast<size_t>(to.bytes())) throw Error(kExitBug, "sizes that differ");
            if (to.elems > 0) store(ctx, to, bytes);
        }
    }
    [[noreturn]] void abort(int exit_code) override { throw Error(exit_code, "abort"); }
    LocalRanks& all() { return all_; }

private:
    using Bytes = std::vector<char>;

    template <typename T> static T add(T a, T b) { return a + b; }
    // Copies through host memory, so that the threads can share one GPU.
    static Bytes fetch(Ctx& ctx, const Tensor& tensor) {
        Bytes bytes(static_cast<size_t>(tensor.bytes()));
        device::copy_to_host(ctx, bytes.data(), tensor.data, tensor.bytes());
        device::synchronize(ctx);
        return bytes;
    }
    static void store(Ctx& ctx, const Tensor& tensor, const Bytes& bytes) {
        device::copy_to_device(ctx, tensor.data, bytes.data(), tensor.bytes());
        device::synchronize(ctx);
    }
    void post(const void* mine) {
        all_.posted_[static_cast<size_t>(world().rank)] = mine;
        all_.meet();
    }
    // Elements [begin, begin + count) = those of all ranks, reduced in rank order.
    template <typename T, typename Join> void reduce(Bytes& bytes, int64_t begin, int64_t count, Join&& join) {
        post(bytes.data());
        const T* first = static_cast<const T*>(all_.posted_[0]) + begin;
        std::vector<T> result(first, first + count);
        T* sums = result.data();   // this file is compiled without optimisation, in which [] of a vector is a call
        for (size_t r = 1; r < all_.posted_.size(); r++) {
            const T* theirs = static_cast<const T*>(all_.posted_[r]) + begin;
            for (int64_t i = 0; i < count; i++) sums[i] = join(sums[i], theirs[i]);
        }
        all_.meet();   // all ranks have read
        std::memcpy(bytes.data() + begin * static_cast<int64_t>(sizeof(T)), result.data(), result.size() * sizeof(T));
    }
    // Shard r of out = shard which(r, own) of rank r's in.
    template <typename Which> void copy_shards(Ctx& ctx, Tensor out, Tensor in, Which&& which) {
        if (in.elems % world().ranks != 0 || out.bytes() != in.bytes()) throw Error(kExitBug, "shards that differ");
        const Bytes mine = fetch(ctx, in);
        post(mine.data());
        const size_t shard = mine.size() / all_.posted_.size();
        Bytes result(mine.size());
        for (size_t r = 0; r < all_.posted_.size(); r++) {
            const char* theirs = static_cast<const char*>(all_.posted_[r]);
            const auto from = static_cast<size_t>(which(static_cast<int>(r), world().rank));
            std::memcpy(result.data() + r * shard, theirs + from * shard, shard);
        }
        all_.meet();
        store(ctx, out, result);
    }

    LocalRanks& all_;
};

inline std::unique_ptr<Comm> LocalExchange::subgroup(const std::vector<int>& members) {
    const auto own = std::find(members.begin(), members.end(), world().rank);
    if (own == members.end()) throw Error(kExitBug, "a subgroup without this rank");
    return std::make_unique<LocalComm>(all_.group(members), static_cast<int>(own - members.begin()));
}

inline std::vector<std::string> LocalRanks::errors(const std::function<void(LocalComm&)>& body) {
    std::vector<std::string> ends(posted_.size(), "nothing");
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < posted_.size(); rank++)
        threads.emplace_back([&, rank] {
            LocalComm comm(*this, static_cast<int>(rank));
            auto end = [&](const Error& error) {
                ends[rank] = strf("exit %d: %s", error.exit_code, error.what());
                fail(error);
            };
            try {
                body(comm);
            } catch (const Error& error) {
                end(error);
            } catch (const std::exception& error) {
                end(Error(kExitBug, error.what()));
            }
        });
    for (std::thread& thread : threads) thread.join();
    return ends;
}

inline void LocalRanks::run(const std::function<void(Comm&)>& body) {
    errors(body);
    if (failed_) throw first_;
}

inline std::vector<std::string> run_ranks(int ranks, const std::function<void(LocalComm&)>& body) {
    return LocalRanks(ranks).errors(body);
}
