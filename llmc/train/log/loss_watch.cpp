#include "llmc/train/log/loss_watch.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "llmc/base/check.h"
#include "llmc/base/median.h"
#include "llmc/config/config_value.h"

using Json = nlohmann::json;

LossWatch::Verdict LossWatch::add(const Config& config, double loss) {
    if (first_.size() < kFirst) first_.push_back(loss);
    last_.push_back(loss);
    if (last_.size() > kLast) last_.pop_front();
    if (last_.size() < kLast) return Verdict::kFine;
    const double ratio = latest() / start();
    if (config.stop_on_divergence > 0 && ratio > config.stop_on_divergence) return Verdict::kStop;
    if (above_ && ratio <= 1) above_ = false;
    if (above_ || !(ratio > kWarn)) return Verdict::kFine;
    above_ = true;
    return Verdict::kWarn;
}

double LossWatch::start() const { return std::min(first_.front(), median_of(first_)); }
double LossWatch::latest() const { return median_of({last_.begin(), last_.end()}); }

std::string LossWatch::text(const Config& config, int64_t step, Verdict verdict) const {
    std::string limit;
    if (verdict == Verdict::kStop) limit = " (--stop-on-divergence " + number_text(config.stop_on_divergence) + ")";
    std::string help = strf("a lower --lr (now %s), a longer --lr-warmup-iters (now %lld)",
                            number_text(config.lr).c_str(), ll(config.lr_warmup_iters));
    if (config.clip_grad == 0 || config.clip_grad > 1)
        help += strf(", --clip-grad 1 (now %s)", number_text(config.clip_grad).c_str());
    if (config.fp8_recipe != Fp8Recipe::kNone) help += ", --first-last-layers-bf16";
    return strf("step %lld: loss %.4g (median of %zu steps) is %.2f times its start of %.4g%s; what usually helps: "
                "%s", ll(step), latest(), kLast, latest() / start(), start(), limit.c_str(), help.c_str());
}

std::string LossWatch::state_json() const { return Json{{"first", first_}, {"last", last_}, {"above", above_}}.dump(); }

void LossWatch::restore(const std::string& json) {
    const Json state = Json::parse(json);
    first_ = state.at("first").get<std::vector<double>>();
    last_ = state.at("last").get<std::deque<double>>();
    above_ = state.at("above").get<bool>();
}
