// Work that several threads share, and threads that get no signals.
#pragma once
#include <signal.h>

#include <algorithm>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

// Runs `work` in this thread and in others, at most `most` and one per core together, and waits for all.
inline void on_threads(size_t most, const std::function<void()>& work) {
    std::vector<std::jthread> pool;
    try {
        for (size_t t = 1; t < std::min<size_t>(most, std::thread::hardware_concurrency()); t++)
            pool.emplace_back(work);
    } catch (const std::system_error&) {
        // No further thread can be started (ulimit -u, -v): those that run do all the work.
    }
    work();
}

// Blocks all signals for the calling thread within this scope. A thread that is started in the scope keeps them blocked
// until it ends, so that only the thread that trains handles signals.
class SignalsBlocked {
public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

private:
    sigset_t before_;
};
