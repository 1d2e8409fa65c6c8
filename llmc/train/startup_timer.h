// How long the parts of a run's start took, until its first step is done.
#pragma once
#include <string>
#include <vector>

class StartTimes {
public:
    // The part that begins with the process ends here; the others end one after the other.
    void done(const char* part);
    // "first step done after 21.4 s: launch 0.6, data 0.1, ...": seconds since the process began. Without /proc, since
    // the first done().
    std::string text() const;

private:
    struct Part {
        const char* name;
        double seconds;
    };
    std::vector<Part> parts_;
    double last_ = -1;
};
