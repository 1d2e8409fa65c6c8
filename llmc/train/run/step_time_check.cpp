#include "llmc/train/run/step_time_check.h"

#include "llmc/base/check.h"

bool StepTimeCheck::add(int64_t step, double ms) {
    if (++steps_ > kLast) return false;
    last_step_ = step;
    if (steps_ >= kFirst) ms_.push_back(ms);
    return steps_ == kLast;
}

std::string StepTimeCheck::text() const {
    const std::string measured = strf("measured %.1f ms (median of steps %lld-%lld)", measured_ms(),
                                      ll(last_step_ - kLast + kFirst), ll(last_step_));
    if (predicted_.ms <= 0) return "no step time is predicted for this device, " + measured;
    const std::string& other = predicted_.scaled_from;
    return strf("predicted %.1f ms a step%s, %s, %+.1f %%", predicted_.ms,
                other.empty() ? "" : strf(" (rates scaled from %s)", other.c_str()).c_str(), measured.c_str(),
                100 * (predicted_.ms / measured_ms() - 1));
}
