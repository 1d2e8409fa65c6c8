// The watchdog: a thread of every rank that monitors all ranks and never waits for another rank or for the device. When
// a rank is gone, or sends no heartbeat or makes no progress for the timeout, every rank ends itself with exit code 6,
// and the lowest rank that still runs prints the hang report.
#pragma once
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

// A rank's process, gathered from all ranks at the start.
struct RankCard {
    std::string host;
    std::string place;      // ranks with equal places share memory and see each other's processes
    int64_t pid = 0, started = 0;   // the start time distinguishes the process from a later one with the same pid
    int host_number = 0;    // of its place, in the order of the ranks
};
RankCard own_card();
// Sets every host_number. Returns the first rank of each place.
std::vector<int> number_hosts(std::vector<RankCard>& cards);

// The state of a process of this host and place.
RankView::Process process_state(int64_t pid, int64_t started);

class Watchdog {
public:
    // Functions of the device's communication library, each optional. The watchdog's threads call them. Only `post` is
    // called by the thread that posts heartbeats, so the other two may block.
    struct Device {
        std::function<std::string()> error;        // of collectives, "" if there is none; may never return
        std::function<void()> abort_collectives;   // may never return
        std::function<void(Heartbeat&)> post;      // posts how many of the enqueued collectives have begun and finished
    };
    // `heartbeats` has a row for each rank, and outlives this object. `link` is null if there is only one host, and for
    // ranks that are not the first of their host. `kept`: the launch wrapper prints the text of the heartbeat table.
    Watchdog(int rank, std::vector<RankCard> cards, HeartbeatTable& heartbeats,
             std::unique_ptr<HeartbeatLink> link, bool kept);
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

    // Starts the threads. If the system has none left (std::system_error), the other ranks are told that this one ends.
    void start();

    Heartbeat& own_row() { return heartbeats_.row(rank_); }
    void set_device(Device device);
    // Marks the rows of a host that cannot be reached as unknown.
    void forget_host(int host_number);

private:
    using Clock = std::chrono::steady_clock;
    struct Seen {
        RankPost post;
        Clock::time_point last_progress, last_beat;
        double ended_s = -1;
    };

    void run();
    bool wait_for_next_tick();
    void poll_errors();
    void join();   // ends those threads that were started
    void tick();
    void post_own();
    std::string confirmed_error();
    void send_rows();
    void receive_rows();
    void receive(int peer, HeartbeatLink::Kind kind, const std::string& bytes);
    void observe();
    std::vector<RankView> views() const;
    void check_link_and_ends();
    void check_own_end() const;
    void tell_end();
    void write_summary(const std::vector<RankView>& ranks);
    void store_hang_report(const std::string& text);
    [[noreturn]] void end_run();
    void print_hang_report();
    void kill_suspended();
    void abort_device_collectives();
    bool local(int rank) const;

    const int rank_;
    std::vector<RankCard> cards_;
    const std::vector<int> firsts_;
    HeartbeatTable& heartbeats_;
    std::unique_ptr<HeartbeatLink> link_;
    const bool kept_;
    std::vector<bool> known_, lost_;   // by rank: posts reach this host; its host's connection broke
    std::vector<Seen> seen_;
    int64_t file_blocks_ = 0;   // at the last tick
    bool announced_ = false;    // the outcome, to the launch wrapper
    Clock::time_point last_tick_, last_rows_;

    std::mutex device_mutex_;
    Device device_;
    std::string device_error_;
    Clock::time_point device_error_since_;

    std::mutex error_mutex_;           // held during a call of error_
    std::condition_variable error_wake_;
    bool stop_polling_ = false;
    std::function<std::string()> error_;
    std::thread error_poller_;

    std::mutex mutex_;
    int stop_event_ = -1;   // an eventfd, readable once the thread must end
    std::thread thread_;
};

// Sets the seconds without progress after which the run ends, 0: never. All ranks must set the same.
void set_comm_timeout(double seconds);
// Does not return if the watchdog is ending the run, so that only the watchdog prints why. patient: a peer is lost, so
// this first waits a moment for the watchdog to notice.
void yield_to_watchdog(bool patient);
