// The predicted time of a step beside the measured one.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "llmc/base/median.h"

struct PredictedStep {
    double ms = 0;             // 0: no rates of this device are known
    std::string scaled_from = {};   // the GPU whose rates were scaled to this one; "" if its own are known
    std::vector<std::pair<std::string, double>> parts_ms = {};
};

// Compares the predicted time with the median of a process's steps 11 to 20.
class StepTimeCheck {
public:
    explicit StepTimeCheck(PredictedStep predicted) : predicted_(std::move(predicted)) {}
    // Adds a step. Returns true for the twentieth.
    bool add(int64_t step, double ms);
    const PredictedStep& predicted() const { return predicted_; }
    double measured_ms() const { return median_of(ms_); }
    // "predicted 571.3 ms a step, measured 573.0 ms (median of steps 11-20), -0.3 %"
    std::string text() const;

private:
    static constexpr int kFirst = 11, kLast = 20;
    const PredictedStep predicted_;
    int steps_ = 0;
    int64_t last_step_ = 0;
    std::vector<double> ms_;
};
