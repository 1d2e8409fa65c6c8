// The durations of the parts of a run's start, until its first step is done.
#pragma once
#include <string>
#include <vector>

class StartTimes {
public:
    // Ends a part, which began at the end of the previous one; the first one began with the process.
    void done(const char* part);
    // "first step done after 21.4 s: launch 0.6, data 0.1, ...": since the process began or, without /proc, since the
    // first done().
    std::string text() const;

private:
    struct Part {
        const char* name;
        double seconds;
    };
    std::vector<Part> parts_;
    double last_ = -1;
};
