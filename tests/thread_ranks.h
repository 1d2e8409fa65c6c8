// Ranks as threads of one process: host exchange for tests that need several of them and no MPI.
#pragma once
#include "tests/doctest.h"

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "llmc/check.h"
#include "llmc/comm.h"

namespace thread_ranks {

// Where the ranks meet.
class Meeting {
public:
    explicit Meeting(int ranks) : mine_(static_cast<size_t>(ranks)) {}

    std::vector<std::string> gather(int rank, const std::string& text) {
        std::unique_lock lock(mutex_);
        if (left_) throw Error(kExitPeerLost, "a rank left");
        mine_[static_cast<size_t>(rank)] = text;
        const int64_t round = round_;
        if (++waiting_ == static_cast<int>(mine_.size())) {
            all_ = mine_;
            waiting_ = 0;
            round_++;
            changed_.notify_all();
            return all_;
        }
        changed_.notify_all();
        changed_.wait(lock, [&] { return round_ != round || left_; });
        if (round_ == round) throw Error(kExitPeerLost, "a rank left");
        return all_;
    }
    // This rank makes no more calls: who waits for it gets an error instead.
    void leave() {
        std::lock_guard lock(mutex_);
        left_ = true;
        changed_.notify_all();
    }
    // Returns when all other ranks wait in gather, or left.
    void wait_for_the_others() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return waiting_ == static_cast<int>(mine_.size()) - 1 || left_; });
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::string> mine_, all_;
    int waiting_ = 0;
    int64_t round_ = 0;
    bool left_ = false;
};

class ThreadComm : public Comm {
public:
    ThreadComm(int rank, int ranks, Meeting& meeting)
        : Comm({.rank = rank, .ranks = ranks, .local_rank = rank, .local_ranks = ranks}), meeting_(meeting) {}

    std::vector<std::string> gather(const std::string& mine) override { return meeting_.gather(world().rank, mine); }
    void sum(Ctx&, Tensor) override { host_only(); }
    void max(Ctx&, uint32_t*, int64_t) override { host_only(); }
    void reduce_scatter(Ctx&, Tensor) override { host_only(); }
    void all_gather(Ctx&, Tensor) override { host_only(); }
    void all_to_all(Ctx&, Tensor, Tensor) override { host_only(); }
    [[noreturn]] void abort(int exit_code) override { throw Error(exit_code, "aborted"); }

    Meeting& meeting() { return meeting_; }

private:
    [[noreturn]] static void host_only() { throw Error(kExitBug, "ranks of tests exchange host memory only"); }
    Meeting& meeting_;
};

// Runs body on every rank; by rank "exit 7: message" or "nothing". A rank that ends with an error never leaves another
// waiting.
inline std::vector<std::string> run_ranks(int ranks, const std::function<void(ThreadComm&)>& body) {
    Meeting meeting(ranks);
    std::vector<std::string> errors(static_cast<size_t>(ranks), "nothing");
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; rank++)
        threads.emplace_back([&, rank] {
            ThreadComm comm(rank, ranks, meeting);
            try {
                body(comm);
            } catch (const Error& error) {
                errors[static_cast<size_t>(rank)] = "exit " + std::to_string(error.exit_code) + ": " + error.what();
                meeting.leave();
            }
        });
    for (std::thread& thread : threads) thread.join();
    return errors;
}

}  // namespace thread_ranks
