// Compares the loss of a run with that of its start, to find a divergence while losses are still finite.
#pragma once
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "llmc/config/config.h"

// The loss of the start is the lower of the first loss and the median of the first kFirst losses: the first alone may
// be that of a hard batch, and with a far too high learning rate the loss rises from the second step on. The median of
// the last kLast losses is compared with it, so that one hard batch does not count as divergence. Skipped steps have no
// loss.
class LossWatch {
public:
    static constexpr size_t kFirst = 5, kLast = 3;
    static constexpr double kWarn = 1.5;   // times the start

    // What a step's loss means: nothing, the beginning of an excursion above kWarn x the start, or that
    // the run ends (--stop-on-divergence). An excursion ends when the loss is back at the start.
    enum class Verdict { kFine, kWarn, kStop };
    Verdict add(const Config& config, double loss);

    double start() const;    // of at least one loss
    double latest() const;
    // "step 12: loss 18.2 (median of 3 steps) is 1.68 times its start of 10.83; what usually helps: ..."
    std::string text(const Config& config, int64_t step, Verdict verdict) const;

    // The state as JSON for a checkpoint, so that a resumed run compares with the same start.
    std::string state_json() const;
    void restore(const std::string& json);

    bool operator==(const LossWatch&) const = default;

private:
    std::vector<double> first_;
    std::deque<double> last_;
    bool above_ = false;
};
