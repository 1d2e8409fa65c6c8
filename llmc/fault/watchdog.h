// The watchdog: a thread of every rank that watches all others and never waits for another rank or for the device. When
// a rank is gone, sends no heartbeat or makes no progress for the timeout, every rank ends by itself with exit code 6,
// and the lowest rank that still runs prints the hang report.
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

// What the ranks exchange about themselves at the start.
struct RankCard {
    std::string host;       // its name
    std::string place;      // ranks of equal places share memory and see each other's processes
    int64_t pid = 0, started = 0;   // the start time tells the process from a later one with the same number
    int host_number = 0;    // number of its place, in the order of the ranks
};
RankCard own_card();
// Sets every host_number. Returns the first rank of each place.
std::vector<int> number_hosts(std::vector<RankCard>& cards);

// The state of a process of this host and place.
RankView::Process process_state(int64_t pid, int64_t started);

class Watchdog {
public:
    // How the device's library is watched; each function may be empty. The watchdog's threads call them. Only `post` is
    // called from the thread that posts heartbeats, so the other two may block.
    struct Device {
        std::function<std::string()> error;   // what has failed, "" for nothing; may never return
        std::function<void()> cut;            // aborts pending collectives; may never return
        std::function<void(Heartbeat&)> post;  // posts how many of the queued collectives have begun and finished
    };
    // `heartbeats` has a row for each rank. `link` is null on one host, and for ranks that are not the first of their
    // host. `kept`: the launch wrapper prints the text of the heartbeat table.
    Watchdog(int rank, std::vector<RankCard> cards, HeartbeatTable heartbeats,
             std::unique_ptr<HeartbeatLink> link, bool kept);
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

    Heartbeat& own_row() { return heartbeats_.row(rank_); }
    const HeartbeatHeader& header() const { return heartbeats_.header(); }
    void set_device(Device device);
    // Marks the rows of a host that cannot be reached as unknown.
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
    std::string device_error_;
    Clock::time_point device_error_since_;

    std::mutex asking_mutex_;          // held while the library is asked for errors
    std::condition_variable asked_enough_;
    bool stop_asking_ = false;
    std::function<std::string()> error_;
    std::thread asker_;

    std::mutex mutex_;
    std::condition_variable wake_;
    bool stop_ = false;
    std::thread thread_;
};

// Sets the seconds without progress after which the run ends, 0: never. All ranks must set the same.
void set_comm_timeout(double seconds);
// Does not return if the watchdog is ending the run, so that only the watchdog prints why. patient: a peer is lost, so
// first waits a moment for the hang report.
void yield_to_watchdog(bool patient);
