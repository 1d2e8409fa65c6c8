// The watchdog: a thread of every rank that monitors the ranks of its host and never waits for another rank or for the
// device. When one of them is gone, sends no heartbeat or makes no progress for the timeout, or all of them wait for
// another host for so long, every rank of the host ends itself with exit code 6, and one of them
// prints the hang report. Hosts do not know of each other's heartbeats.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "llmc/fault/heartbeat.h"
#include "llmc/fault/rank_view.h"

// A rank's process, gathered from all ranks at the start.
struct RankProcess {
    int rank = 0;
    std::string host;
    std::string place;      // ranks with equal places share memory and see each other's processes: the ranks of a host
    int64_t pid = 0, started = 0;   // the start time distinguishes the process from a later one with the same pid
};
RankProcess own_process();   // without the rank
RankView::Process process_state(int64_t pid, int64_t started);   // of a process of this host

class Watchdog {
public:
    // Functions of the device's communication library, each optional. The watchdog's threads call them. Only `post` is
    // called by the thread that posts heartbeats, so the other two may block.
    struct Device {
        std::function<std::string()> error;        // of collectives, "" if there is none; may never return
        std::function<void()> abort_collectives;   // may never return
        std::function<void()> post;                // posts how many of the enqueued collectives have begun and finished
    };
    // For this process, ranks[own] of all `ranks` of the host, in whose order `table` has their rows; it must outlive
    // this object. others: see hang_report. hosts: the names of all hosts, for the launch wrapper.
    Watchdog(std::vector<RankProcess> ranks, size_t own, HeartbeatTable& table, std::string others = "",
             const std::string& hosts = "");
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

    // Starts the threads. If the system has none left (std::system_error), the other ranks are told that this one ends.
    void start();

    // After it returns, the functions set before are no longer called.
    void set_device(Device device);

private:
    using Clock = std::chrono::steady_clock;
    struct Seen {
        int64_t progress = 0, beats = 0;
        int end_code = -1;
        Clock::time_point last_progress, last_beat, ended;
    };

    void run();
    void poll_errors();
    void join();   // ends those threads that were started
    void tick();
    void post_own();
    std::string confirmed_error();
    void observe();
    std::vector<RankView> views() const;
    void post_to_launcher();
    void end_late_exit();
    void print_report(const std::string& text);
    [[noreturn]] void end_run();
    void abort_device_collectives();
    Heartbeat& row() { return table_.row(own_); }

    const std::vector<RankProcess> ranks_;
    const size_t own_;
    HeartbeatTable& table_;
    const std::string others_;
    std::vector<Seen> seen_;
    int64_t file_blocks_ = 0;   // at the last tick
    Clock::time_point last_tick_ = Clock::now();

    std::atomic<bool> stopping_{false};
    std::mutex device_mutex_;          // of the next three
    Device device_;
    std::string device_error_;
    Clock::time_point device_error_since_;
    std::condition_variable wake_;     // with device_mutex_
    std::thread thread_;

    std::mutex error_mutex_;           // of error_, and held during its call
    std::function<std::string()> error_;
    std::condition_variable error_wake_;
    std::thread error_poller_;
};

// Sets the seconds without progress after which the run ends, 0: never. All ranks must set the same.
void set_comm_timeout(double seconds);
// Does not return if the watchdog is ending the run, so that only the watchdog prints why. patient: a peer is lost, so
// this first waits a moment for the watchdog to notice.
void yield_to_watchdog(bool patient);
