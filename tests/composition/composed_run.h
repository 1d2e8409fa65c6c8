// Training runs in this process, whose ranks are threads, and the plainest run that computes the same.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <cmath>
#include <map>
#include <string>

#include "llmc/config/schedule.h"
#include "llmc/perf/step_time.h"
#include "llmc/train/train_loop.h"
#include "tests/composition/drawn_set.h"
#include "tests/support/checkpoint_test.h"
#include "tests/support/data_test.h"
#include "tests/support/zero_test.h"

namespace composition {

// ---- data

constexpr int32_t kSeparator = TestModel::kSeparator;
constexpr uint32_t kDataVocab = 61;

// Tokens of documents of 1 to 20 tokens, most of which follow from the one before.
inline std::vector<uint32_t> documents(uint64_t key, size_t count) {
    std::vector<uint32_t> tokens;
    for (size_t i = 0, left = 0; i < count; i++, left--) {
        const Philox4 draw = philox(key, i);
        if (left == 0) left = 1 + draw.word[0] % 20, tokens.push_back(kSeparator);
        else if (draw.word[1] % 4 > 0) tokens.push_back(2 + tokens.back() * 7 % (kDataVocab - 2));
        else tokens.push_back(2 + draw.word[2] % (kDataVocab - 2));
    }
    return tokens;
}

// Two questions of two completions in llm.c's format.
inline std::string hellaswag() {
    std::string body;
    for (uint16_t word : {0xffff, 26, 0, 1, 2, 2, 5, 9, 1, 7, 2, 8, 4, 0xffff, 26, 1, 0, 2, 1, 3, 3, 2, 6, 5, 1, 9})
        data_test::append(body, word);
    std::string header;
    for (uint32_t word : {20240522, 1, 2, 26}) data_test::append(header, word);
    header.resize(1024);
    return header + body;
}

inline void write_data(const std::string& folder) {
    const auto write = [&](const std::string& name, uint64_t key, size_t count) {
        data_test::spill(folder + "/" + name + ".bin", data_test::llmc_v1(documents(key, count)));
        data_test::spill(folder + "/" + name + ".meta.json",
                         strf("{\"tokenizer\": {\"separator\": %d}}", static_cast<int>(kSeparator)));
    };
    write("masked", 1, 900);
    write("whole", 2, 700);
    write("valid", 3, 4000);   // enough for the default of --eval-iters
    std::vector<uint8_t> counts;
    for (uint64_t i = 0; i < 900; i++) counts.push_back(philox(4, i / 13).word[0] % 2);
    data_test::spill(folder + "/masked.mask", data_test::mask_bytes(counts));
    data_test::spill(folder + "/hellaswag.bin", hellaswag());
}

// ---- a run

struct StepFigures {
    Figure loss, norm;
    bool operator==(const StepFigures&) const = default;
};
using Steps = std::map<int64_t, StepFigures>;   // by number, from 1

struct Outcome {
    Steps steps;
    std::map<std::string, std::string> files;   // of the last checkpoint, without the options
};

// Sends what runs print to /dev/null.
class Silence {
public:
    Silence() {
        std::fflush(stdout);
        const int nowhere = ::open("/dev/null", O_WRONLY);
        ::dup2(nowhere, 1);
        ::close(nowhere);
    }
    ~Silence() {
        std::fflush(stdout);
        ::dup2(shown_, 1);
        ::close(shown_);
    }

private:
    const int shown_ = ::dup(1);
};

inline std::string step_folder(const std::string& save, int step) { return save + strf("/step-%08d", step); }

inline Outcome outcome_of(const std::string& save) {
    Outcome outcome;
    std::istringstream log(files_test::slurp(save + "/log.jsonl"));
    for (std::string line; std::getline(log, line);) {
        const Json record = Json::parse(line);
        if (record.at("type") != "step") continue;
        const auto figure = [&](const char* name) {
            return record.at(name).is_number() ? Figure{record.at(name).get<double>()} : Figure{NAN};
        };
        outcome.steps[record.at("step").get<int64_t>()] = {figure("loss"), figure("grad_norm")};
    }
    outcome.files = checkpoint_test::contents(step_folder(save, kSteps));
    Json state = Json::parse(outcome.files.at("state.json"));
    state.erase("config");
    outcome.files["state.json"] = state.dump();
    return outcome;
}

// Trains to the last step, from the checkpoint `resume` unless it is empty. Throws the run's error.
inline Outcome run_part(const std::string& family, const Part& part, const std::string& data, const std::string& save,
                        int save_interval, const std::string& resume = "") {
    Part saved = part;
    saved.settings.push_back({find_option("save"), save});
    saved.settings.push_back({find_option("save-interval"), std::to_string(save_interval)});
    if (!resume.empty()) {
        std::erase_if(saved.settings, [](const Setting& one) { return is(one, "init-method-std"); });   // restored
        saved.settings.push_back({find_option("resume"), resume});
    }
    LocalRanks ranks(part.ranks);
    ranks.defers_compute = part.defers_compute;
    const Silence silence;
    ranks.run([&](Comm& comm) {
        const ParsedConfig options = parsed(family, saved, data);
        const Fp8Plan plan = fp8_plan_of(options.config, make_param_table(options.config.shape));
        const auto predict = [](const Config& config, const MemoryPlan& memory, const DeviceInfo& device) {
            return predicted_step(config, memory, device);
        };
        // After an error it is not destroyed, because that would wait for ranks which are gone.
        auto* const loop = new TrainLoop(options, plan, "", predict, comm);
        loop->run();
        delete loop;
    });
    return outcome_of(save);
}

// What a run on one rank gives, one sequence at a time, without anything that changes no more than rounding. Batches,
// their targets and their number are the test's own.
inline Steps run_plainest(const std::string& family, const Part& part, const std::string& data) {
    Part plain = part.at_least(MayChange::kNumerics);
    plain.ranks = 1;
    Config config = parsed(family, plain, data).config;
    std::vector<std::string> notes;
    RunData shards;
    shards.open(config, notes);
    TestModel model(config);
    const int64_t T = config.seq_length;
    Steps steps;
    for (int64_t step = 0, first = 0; step < kSteps;) {
        const int64_t count = batch_size_at(config, first);
        std::vector<int32_t> tokens(static_cast<size_t>(count * T)), targets(tokens.size());
        for (int64_t i = 0; i < count; i++)
            shards.train->read(first + i, tokens.data() + i * T, targets.data() + i * T);
        first += count;
        model.set_batch(tokens, targets);
        if (model.counted == 0) continue;
        model.staged.inputs->lr = static_cast<float>(learning_rate(config, step));
        model.step();
        steps[++step] = {{model.loss()}, {static_cast<double>(model.result.grad_norm)}};
    }
    return steps;
}

// ---- comparison

inline std::string difference(const Steps& found, const Steps& expected, double tolerance) {
    for (const auto& [step, figures] : found) {
        const StepFigures& other = expected.at(step);
        const auto differs = [&](const char* name, Figure a, Figure b) {
            if (a == b || std::fabs(a.value - b.value) <= tolerance * std::fabs(b.value)) return std::string();
            return strf("step %lld: %s %.9g instead of %.9g", ll(step), name, a.value, b.value);
        };
        const std::string text = differs("loss", figures.loss, other.loss) + differs("norm", figures.norm, other.norm);
        if (!text.empty()) return text;
    }
    return "";
}

// Differences in bits.
inline std::string difference(const Outcome& found, const Outcome& expected) {
    if (const std::string text = difference(found.steps, expected.steps, 0); !text.empty()) return text;
    for (const auto& [name, bytes] : expected.files)
        if (!found.files.contains(name)) return "no file " + name;
        else if (found.files.at(name) != bytes) return name + " has other bytes";
    return found.files.size() == expected.files.size() ? "" : "more files";
}

// Runs the set in `folder` and compares it with plainer runs. Returns "" or the first difference.
inline std::string failure_of(const DrawnSet& set, const std::string& data, const std::string& folder) {
    constexpr double kTolerance = 1e-6;
    const auto plain = [&](size_t p) {
        Part part = set.parts[p].at_least(MayChange::kRounding);
        if (part.ranks > 1) part.settings.push_back({find_option("overlap"), "off"});
        return part;
    };
    const auto run = [&](const Part& part, const std::string& name, const std::string& from = "") {
        return run_part(set.family, part, data, folder + "/" + name, std::max(1, set.resume_at),
                        from.empty() ? "" : step_folder(folder + "/" + from, set.resume_at));
    };
    const bool fp32 = is_fp32(parsed(set.family, set.parts[0], data).config);
    const Steps plainest = fp32 ? run_plainest(set.family, set.parts[0], data) : Steps();
    const Outcome expected = run(plain(0), "plain"), found = run(set.parts[0], "drawn");
    std::string text = difference(found, expected);
    if (text.empty() && fp32) text = difference(found.steps, plainest, kTolerance);
    if (!text.empty() || set.parts.size() == 1) return text;
    const bool same = plain(0).ranks == plain(1).ranks && plain(0).settings == plain(1).settings;
    const Outcome resumed = run(set.parts[1], "resumed", "drawn");
    text = difference(resumed, same ? expected : run(plain(1), "plain resumed", "plain"));
    if (text.empty() && fp32) text = difference(resumed.steps, plainest, kTolerance);
    return text.empty() ? "" : "resumed: " + text;
}

}  // namespace composition
