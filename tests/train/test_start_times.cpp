#include "tests/support/doctest.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <thread>

#include "llmc/train/run/start_times.h"

TEST_CASE("the parts of a start are printed in order; the first part counts from the start of the process") {
    StartTimes times;
    times.done("launch");
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    times.done("data");
    times.done("step");
    double total = -1, launch = -1, data = -1, step = -1;
    const int read = std::sscanf(times.text().c_str(), "first step done after %lf s: launch %lf, data %lf, step %lf",
                                 &total, &launch, &data, &step);
    CAPTURE(times.text());
    CHECK_EQ(read, 4);
    CHECK_GE(launch, 0);
    CHECK_GE(data, 0.2);   // one place: 0.25 rounded
    CHECK_GE(step, 0);
    CHECK_LT(std::fabs(total - launch - data - step), 0.25);   // four roundings to a tenth: 0.2 at most
    // This process did not begin before the machine's last restart, nor later than its own first lines.
    std::this_thread::sleep_for(std::chrono::milliseconds(120));
    StartTimes later;
    later.done("launch");
    double afterwards = -1;
    CHECK_EQ(std::sscanf(later.text().c_str(), "first step done after %lf s", &afterwards), 1);
    CHECK_GT(afterwards, launch + 0.25);   // 0.37 or more, two roundings
}
