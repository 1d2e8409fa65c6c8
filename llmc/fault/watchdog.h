// The thread of a rank that watches all others: nothing it does waits for another rank or for the device. When a rank
// is gone, gives no sign of life or makes no progress for the timeout, every rank ends by itself with exit 6, and the
// lowest one that lives says who waits for whom.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "llmc/fault/hang_report.h"
#include "llmc/fault/heartbeat.h"
#include "llmc/fault/heartbeat_link.h"

// What every rank tells the others when they meet.
struct RankCard {
    std::string host;       // its name
    std::string place;      // ranks of equal places share memory and see each other's processes
    int64_t pid = 0, started = 0;   // started: of the process, so that its number can be used again
    int host_number = 0;    // of its place, in the order of the ranks
};
RankCard own_card();
// By host_number: the first rank of each.
std::vector<int> number_hosts(std::vector<RankCard>& cards);

// A process of this host and place.
RankView::Process process_state(int64_t pid, int64_t started);

class Watchdog {
public:
    // How the device's library is watched. All may be empty; called from the watchdog's threads, and only `post` from
    // the one that posts signs of life and looks at the others.
    struct Device {
        std::function<std::string()> error;   // what failed there, "" for nothing; may never return, too
        std::function<void()> cut;            // gives up what waits there; may never return
        std::function<void(Heartbeat&)> post;  // how far it is in the collectives it was given
    };
    // heartbeat table: rows of all ranks; link: null on one host and for ranks that are not the first of
    // theirs. kept: the launch wrapper shows the heartbeat table's text.
    Watchdog(int rank, std::vector<RankCard> cards, HeartbeatTable heartbeats,
             std::unique_ptr<HeartbeatLink> link, bool kept);
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

    Heartbeat& own_row() { return heartbeats_.row(rank_); }
    const HeartbeatHeader& header() const { return heartbeats_.header(); }
    void set_device(Device device);
    // Rows of hosts that cannot be reached say nothing.
    void forget_host(int host_number);

private:
    using Clock = std::chrono::steady_clock;
    struct Seen {
        RankPost post;
        Clock::time_point moved, sign;
        double ended_s = -1;
    };

    void run();
    void ask();
    void tick();
    void post_own();
    std::string lasting_error();
    void exchange_rows();
    void receive(int peer, HeartbeatLink::Kind kind, const std::string& bytes);
    void observe();
    std::vector<RankView> views() const;
    void check_link_and_ends();
    void report(const std::vector<RankView>& ranks);
    void announce(const std::string& text);
    [[noreturn]] void leave();
    void tell(const std::vector<RankView>& ranks);
    void end_stopped();
    void cut_device();
    bool local(int rank) const;

    const int rank_;
    std::vector<RankCard> cards_;
    const std::vector<int> firsts_;
    HeartbeatTable heartbeats_;
    std::unique_ptr<HeartbeatLink> link_;
    const bool kept_;
    std::vector<bool> known_, lost_;   // by rank: posts reach this host; its host's connection broke
    std::vector<Seen> seen_;
    int64_t file_blocks_ = 0;   // at the last look
    Clock::time_point last_tick_, last_rows_;

    std::mutex device_mutex_;
    Device device_;
    std::string late_error_;
    Clock::time_point late_since_;

    std::mutex asking_mutex_;          // held while the library is asked
    std::condition_variable asked_enough_;
    bool stop_asking_ = false;
    std::function<std::string()> error_;
    std::thread asker_;

    std::mutex mutex_;
    std::condition_variable wake_;
    bool stop_ = false;
    std::thread thread_;
};

// Seconds without progress after which the run ends, 0: never; the same on all ranks. Before it is called, the default.
void set_comm_timeout(double seconds);
// The run was given up and the watchdog speaks for it: does not return then. patient: waits a moment for its
// hang report, because a peer is lost.
void yield_to_watchdog(bool patient);
