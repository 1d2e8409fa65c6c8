// The step line, the JSON records, which of them a resume removes, and the table of peaks.
#include "tests/support/doctest.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "llmc/base/gpu.h"
#include "llmc/base/system/files.h"
#include "llmc/train/log/run_log.h"
#include "tests/support/files_test.h"

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

StepRecord example() {
    StepRecord r;
    r.step = 120, r.train_iters = 5000, r.loss = 3.28412, r.grad_norm = 0.7149, r.lr = 3e-4, r.step_seconds = 0.4121;
    r.tokens_per_second = 318123, r.mfu = 0.4119, r.memory_gib = 61.28, r.eta_seconds = 33 * 60 + 31.2;
    return r;
}

std::vector<Json> records(const std::string& path) {
    std::vector<Json> all;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) all.push_back(Json::parse(line));
    return all;
}

void write_steps(RunLog& log, int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; step++) {
        StepRecord r = example();
        r.step = step;
        log.step(r, false);
    }
}

std::vector<int64_t> steps_of(const std::vector<Json>& all, const std::string& type) {
    std::vector<int64_t> steps;
    for (const Json& record : all)
        if (record.at("type") == type) steps.push_back(record.at("step").get<int64_t>());
    return steps;
}

int refused(const std::string& path, bool append, const std::string& why = "") {
    try {
        RunLog log(path, append, 0);
        return kExitOk;
    } catch (const Error& error) {
        CHECK(std::string(error.what()).find("--log-file " + path) != std::string::npos);
        CHECK(std::string(error.what()).find(why) != std::string::npos);
        return error.exit_code;
    }
}

}  // namespace

TEST_CASE("log: the step line, to the character") {
    CHECK(step_line(example()) == "step 120/5000 | loss 3.2841 | norm 0.71 | 0.412 s/it, 41% MFU | eta 0:33:31");
    StepRecord r = example();
    r.step = r.train_iters = 500000;   // of a long run on many GPUs
    CHECK(step_line(r).size() == 80);
    r.loss = -kNan, r.grad_norm = kInf, r.step = 120, r.train_iters = 5000, r.step_seconds = 0;
    r.tokens_per_second = kNan, r.mfu = {}, r.eta_seconds = -1, r.skipped = r.synthetic = true;
    CHECK(step_line(r)
          == "step 120/5000 | loss    nan | norm  inf |   n/a s/it,   n/a tok/s | eta n/a | "
             "not finite: update skipped | synthetic data");
    r = StepRecord();
    r.step = 7;
    CHECK(step_line(r).substr(0, 16) == "step 7 | loss 0.");
    r = example();
    r.mfu = {};
    r.eta_seconds = 100 * 3600 + 59.6;   // rounds up to a minute, hours go on
    CHECK(step_line(r).substr(step_line(r).find("eta")) == "eta 100:01:00");
    const std::pair<double, const char*> rates[] = {
        {0.5, " 0.50"},    {5, " 5.00"},       {9.994, " 9.99"},  {9.996, " 10.0"},  {51.234, " 51.2"},
        {99.94, " 99.9"},  {99.96, "  100"},   {845, "  845"},    {999.4, "  999"},  {999.6, "1.00k"},
        {2040, "2.04k"},   {51234, "51.2k"},   {144e3, " 144k"},  {999.4e3, " 999k"}, {999.6e3, "1.00M"},
        {1.234e6, "1.23M"}, {12.56e6, "12.6M"}, {999.6e6, "1.00G"}, {-3, "  n/a"}};
    for (const auto& [rate, text] : rates) {
        r.tokens_per_second = rate;
        CHECK(step_line(r).find(" s/it, " + std::string(text) + " tok/s | ") != std::string::npos);
    }
}

TEST_CASE("log: docs/training.md has the table of the fields of a step") {
    std::string table = "| field | meaning |\n| --- | --- |\n";
    for (const StepField& field : step_fields()) table += strf("| `%s` | %s |\n", field.name, field.meaning);
    CHECK_MESSAGE(read_text_file("docs/training.md", 1 << 20).find(table) != std::string::npos, table);
}

TEST_CASE("log: records read back have the same bits, the header is first, and each is flushed immediately") {
    const files_test::TempDir dir;
    std::string path = dir / "a/b/log.jsonl";
    RunLog log(path, false, 0);
    log.header({{"command", "train --lr \"1\""}, {"flops_per_token", 1.0 / 3}});
    CHECK(records(path).size() == 1);   // before the log is closed

    StepRecord r = example();
    r.loss = 0.1 + 0.2, r.grad_norm = kNan, r.grad_mul = -kInf, r.lr = 5e-324, r.step_seconds = 1.0 / 3;
    r.forward_seconds = 1.0 / 12, r.backward_seconds = 2.0 / 9, r.exposed_comm_seconds = 1e-3 / 7;
    r.tokens_per_second = 1.7976931348623157e308, r.samples_per_second = kInf, r.eta_seconds = 12345.678901234567;
    r.samples = (int64_t{1} << 53) + 1, r.tokens = INT64_MAX, r.counted_tokens = 1023, r.skipped = true;
    r.norm_skipped = true, r.norm_limit = 1.0 / 7, r.max_logit = 1.0 / 13, r.clipped_heads = 3, r.z_loss = 1.0 / 11;
    r.skips = 2, r.norm_skips = 1;
    r.router_loss = 1.0 / 17, r.router_entropy = 1.0 / 19, r.expert_load = 1.0 / 21, r.dead_experts = 5;
    r.rank_load = 1.0 / 23;
    log.step(r, false);
    r.mfu = r.exposed_comm_seconds = std::nullopt;
    r.gpu = {.utilization = 97.5, .power_w = 1.0 / 3, .sm_clock_mhz = 1711, .temperature_c = 61,
             .memory_gib = 0.1 + 0.2, .energy_j = 812.5, .joules_per_token = 2.0 / 3, .throttled_by = "power cap"};
    log.step(r, false);
    log.record("eval", 121, {{"loss", 2.0 / 3}, {"accuracy", exact(kInf)}});
    log.record("checkpoint", 120, {{"path", "out/step-120"}});
    log.event("warning", "low disk");
    log.record("sample", 122, {{"text", "caf\xc3\xa9 \xff\x80 \"q\"\n\x01"}});

    std::vector<Json> all = records(path);
    REQUIRE(all.size() == 7);
    CHECK(all[0]["type"] == "header");
    CHECK(all[0]["step"] == 0);
    CHECK(all[0]["command"] == "train --lr \"1\"");
    CHECK(all[0]["flops_per_token"].get<double>() == 1.0 / 3);
    Json step = {{"type", "step"}, {"step", 120}, {"train_iters", 5000}, {"loss", 0.1 + 0.2}, {"grad_norm", "nan"},
                 {"grad_mul", "-inf"}, {"lr", 5e-324}, {"step_seconds", 1.0 / 3}, {"forward_seconds", 1.0 / 12},
                 {"backward_seconds", 2.0 / 9}, {"exposed_comm_seconds", 1e-3 / 7},
                 {"tokens_per_second", 1.7976931348623157e308}, {"samples_per_second", "inf"}, {"mfu", 0.4119},
                 {"memory_gib", 61.28}, {"eta_seconds", 12345.678901234567}, {"samples", (int64_t{1} << 53) + 1},
                 {"tokens", INT64_MAX}, {"counted_tokens", 1023}, {"skipped", true}, {"norm_skipped", true},
                 {"z_loss", 1.0 / 11}, {"norm_limit", 1.0 / 7}, {"max_logit", 1.0 / 13}, {"clipped_heads", 3},
                 {"router_loss", 1.0 / 17}, {"router_entropy", 1.0 / 19}, {"expert_load", 1.0 / 21},
                 {"rank_load", 1.0 / 23}, {"dead_experts", 5}, {"skips", 2}, {"norm_skips", 1}};
    CHECK(all[1] == step);
    step.update({{"mfu", nullptr}, {"exposed_comm_seconds", nullptr},   // an unknown GPU, one rank
                 {"gpu_utilization", 97.5}, {"power_w", 1.0 / 3}, {"sm_clock_mhz", 1711.0}, {"gpu_temperature_c", 61.0},
                 {"gpu_memory_gib", 0.1 + 0.2}, {"energy_j", 812.5}, {"joules_per_token", 2.0 / 3},
                 {"throttled_by", "power cap"}});
    CHECK(all[2] == step);
    CHECK(all[3] == Json{{"type", "eval"}, {"step", 121}, {"loss", 2.0 / 3}, {"accuracy", "inf"}});
    CHECK(all[4] == Json{{"type", "checkpoint"}, {"step", 120}, {"path", "out/step-120"}});
    CHECK(all[5]["kind"] == "warning");
    CHECK(all[5]["step"] == 121);
    CHECK(all[6]["text"] == "caf\xc3\xa9 \xef\xbf\xbd\xef\xbf\xbd \"q\"\n\x01");
    CHECK(screen_text("caf\xc3\xa9 \xff\n\t\x1b[2J\x07\xc2\x9b\x7f") == "caf\xc3\xa9 \xef\xbf\xbd\n\t.[2J....");
}

TEST_CASE("log: a resume removes later steps, wherever the run was killed") {
    const files_test::TempDir dir;
    std::string path = dir / "log.jsonl";
    {
        RunLog log(path, false, 0);
        log.header({});
        write_steps(log, 1, 10);
        log.record("checkpoint", 10, {{"path", "step-10"}});
        write_steps(log, 11, 13);
        log.event("note", "of step 13");
    }
    std::ofstream(path, std::ios::app) << "{\"type\": \"step\", \"step\": 1";   // truncated by the kill
    {
        RunLog log(path, true, 10);
        log.header({});
        write_steps(log, 11, 20);
    }
    std::vector<Json> all = records(path);
    CHECK(steps_of(all, "header") == std::vector<int64_t>{0, 10});
    CHECK(steps_of(all, "checkpoint") == std::vector<int64_t>{10});
    CHECK(steps_of(all, "event").empty());
    std::vector<int64_t> steps = steps_of(all, "step");
    REQUIRE(steps.size() == 20);
    for (int64_t i = 0; i < 20; i++) CHECK(steps[static_cast<size_t>(i)] == i + 1);
    CHECK(all[all.size() - 11]["type"] == "header");   // between steps 10 and 11

    // Resuming a step before an earlier resume also removes that resume's header; resuming the last step of the log
    // removes nothing.
    { RunLog log(path, true, 5); }
    CHECK(steps_of(records(path), "header") == std::vector<int64_t>{0});
    CHECK(steps_of(records(path), "step").size() == 5);
    { RunLog log(path, true, 5); }
    CHECK(records(path).size() == 6);
    CHECK(!fs::exists(path + ".tmp"));

    // Without append, and with append to no file, the log is new.
    { RunLog log(path, false, 0); }
    CHECK(records(path).empty());
    {
        RunLog log(dir / "new.jsonl", true, 7);
        log.header({});
    }
    CHECK(steps_of(records(dir / "new.jsonl"), "header") == std::vector<int64_t>{7});
}

TEST_CASE("log: a new run keeps the logs of earlier ones") {
    const files_test::TempDir dir;
    const std::string path = dir / "log.jsonl";
    const auto text = [](const std::string& file) { return read_text_file(file, 1 << 20); };
    std::string runs[3];
    for (int run = 0; run < 3; run++) {
        RunLog log(path, false, 0);
        CHECK(log.earlier_log() == (run ? path + "." + std::to_string(run) : ""));
        log.header({{"command", "run " + std::to_string(run)}});
        log.event("note", "told");
        runs[run] = text(path);
    }
    CHECK(text(path) == runs[2]);
    CHECK(text(path + ".1") == runs[0]);
    CHECK(text(path + ".2") == runs[1]);
    CHECK(RunLog(path, true, 0, {}, true).earlier_log().empty());   // nothing is removed
    // The records that a resume removes are kept if they may be of another branch; a link stays a link.
    const std::string whole = text(path), link = dir / "link.jsonl";
    fs::create_symlink(path, link);
    {
        RunLog log(link, true, -1, {}, true);
        CHECK(log.earlier_log() == fs::canonical(path).string() + ".3");
    }
    CHECK(text(path + ".3") == whole);
    CHECK(text(path).empty());
    CHECK(fs::is_symlink(link));
}

TEST_CASE("log: one that is truncated, removed or replaced begins again, says so, and can be resumed") {
    const files_test::TempDir dir;
    const std::string path = dir / "log.jsonl";
    const std::pair<const char*, std::function<void()>> harms[] = {
        {"truncated", [&] { fs::resize_file(path, 0); }},
        {"removed", [&] { fs::remove(path); }},
        {"replaced", [&] { fs::rename(path, dir / "rotated"), std::ofstream(path); }}};
    for (const auto& [what, harm] : harms) {
        RunLog log(path, false, 0);
        log.header({});
        write_steps(log, 1, 5);
        harm();
        write_steps(log, 6, 7);
        const std::vector<Json> all = records(path);   // without a hole of NUL bytes
        REQUIRE(all.size() == 4);
        CHECK(all[0].at("type") == "header");
        CHECK(all[1].at("text").get<std::string>().find(strf("was %s by another program at step 6", what))
              != std::string::npos);
        CHECK(steps_of(all, "step") == std::vector<int64_t>{6, 7});
    }
    // Truncated within a write: the header is lost until the next record.
    std::ofstream(path) << R"({"type":"step","step":4})" << "\n" << R"({"type":"step","step":5})" << "\n";
    RunLog(path, true, 4).header({});
    CHECK(steps_of(records(path), "step") == std::vector<int64_t>{4});
    // What took its place may be the file of somebody.
    RunLog log(path, false, 0);
    log.header({});
    fs::remove(path);
    std::ofstream(path) << "my notes\n";
    files_test::check_contains(files_test::error_of([&] { log.event("note", "x", false); }),
                               {"exit 7: --log-file " + path + ": was replaced", "is not a log of a run"});
    CHECK(fs::file_size(path) == 9);
}

TEST_CASE("log: of two runs with one log the second is refused") {
    const files_test::TempDir dir;
    const std::string path = dir / "log.jsonl";
    {
        RunLog log(path, false, 0);
        CHECK(refused(path, true, "another run writes there: end it, or choose another name") == kExitBadInput);
        log.header({});
        for (bool append : {true, false}) CHECK(refused(path, append, "another run writes there") == kExitBadInput);
        write_steps(log, 1, 2);
        CHECK(records(path).size() == 3);
        CHECK(list_directory(dir.path).size() == 1);
    }
    CHECK(refused(path, true) == kExitOk);
    const RunLog one("/dev/null", false, 0), two("/dev/null", false, 0);
}

TEST_CASE("log: to which --save folder it belongs") {
    const files_test::TempDir dir;
    const std::string path = dir / "log.jsonl";
    CHECK(log_saves_in(path, "out"));   // there is none
    RunLog(path, false, 0).header({{"config", {{"save", "out"}}}});
    CHECK(log_saves_in(path, "out"));
    CHECK_FALSE(log_saves_in(path, "elsewhere"));
    RunLog(path, false, 0).header({{"config", {{"save", 7}}}});
    CHECK_FALSE(log_saves_in(path, "out"));
}

TEST_CASE("log: a file that cannot be a log is refused and not changed") {
    const files_test::TempDir dir;
    std::string text = dir / "notes.txt";
    std::ofstream(text) << "my notes\n";
    for (bool append : {true, false}) {
        CHECK(refused(text, append, "exists and is not a log of a run") == kExitBadInput);
        CHECK(fs::file_size(text) == 9);
        CHECK_FALSE(fs::exists(text + ".tmp"));
    }
    std::ofstream(dir / "cut.jsonl") << R"({"type":"header","format":1,"st)";   // the disk was full
    CHECK(refused(dir / "cut.jsonl", false) == kExitOk);
    std::ofstream(dir / "spaced.jsonl") << R"({"step": 0, "type": "header"})" << "\n";   // written by a tool
    CHECK(refused(dir / "spaced.jsonl", true) == kExitOk);
    std::ofstream(dir / "empty.jsonl");
    CHECK(refused(dir / "empty.jsonl", false) == kExitOk);
    CHECK(refused(dir.path, false) == kExitBadInput);
    CHECK(refused(text + "/log.jsonl", false) == kExitBadInput);
    // The error says why the folder could not be made, not that the file in it is missing.
    fs::create_symlink(dir / "nowhere", dir / "link");
    CHECK(refused(dir / "link/log.jsonl", false, "cannot be opened: its folder cannot be made: ") == kExitBadInput);
    if (fs::exists("/dev/full")) {
        RunLog log("/dev/full", false, 0);
        int code = kExitOk;
        try {
            log.header({});
        } catch (const Error& error) {
            code = error.exit_code;
        }
        CHECK(code == kExitDisk);
    }
    RunLog none("", true, 3);   // no file: nothing happens
    none.header({});
    write_steps(none, 1, 2);
}

TEST_CASE("log: only devices whose whole name is in the table have a peak") {
    struct Case {
        const char* name;
        double bf16, fp8, fp32;
    };
    const Case cases[] = {
        {"NVIDIA H100 80GB HBM3", 989.4e12, 1978.9e12, 66.9e12}, {"NVIDIA H200", 989.4e12, 1978.9e12, 66.9e12},
        {"NVIDIA H200 NVL", 835.5e12, 1670.5e12, 60e12}, {"NVIDIA H100 NVL", 835.5e12, 1670.5e12, 60e12},
        {"NVIDIA H100 PCIe", 756.5e12, 1513e12, 51.2e12}, {"NVIDIA B200", 2250e12, 4500e12, 0},
        {"NVIDIA A100-SXM4-80GB", 312e12, 0, 19.5e12}, {"NVIDIA A100 80GB PCIe", 312e12, 0, 19.5e12},
        {"NVIDIA A10", 125e12, 0, 31.2e12}, {"NVIDIA L40S", 362.05e12, 733e12, 91.6e12},
        {"NVIDIA GeForce RTX 4090", 165.2e12, 330.3e12, 82.6e12},
    };
    for (const Case& c : cases) {
        CAPTURE(std::string(c.name));
        CHECK(peak_flops(c.name, Dtype::kBf16) == doctest::Approx(c.bf16).epsilon(1e-12));
        CHECK(peak_flops(c.name, Dtype::kE4m3) == doctest::Approx(c.fp8).epsilon(1e-12));
        CHECK(peak_flops(c.name, Dtype::kE5m2) == peak_flops(c.name, Dtype::kE4m3));
        CHECK(peak_flops(c.name, Dtype::kFp32) == doctest::Approx(c.fp32).epsilon(1e-12));
        CHECK(peak_flops(c.name, Dtype::kFp64) == 0);
    }
    // 132 SMs x 4 tensor cores x 512 multiply-adds a cycle at 1.83 GHz.
    CHECK(peak_flops("NVIDIA H200", Dtype::kBf16) == doctest::Approx(132 * 4 * 1024 * 1.83e9).epsilon(1e-3));
    for (const char* name : {"", "CPU", "NVIDIA H20", "NVIDIA H100", "NVIDIA H200 NVL MIG 1g.18gb", "NVIDIA A10G",
                             "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 D",
                             "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40", "nvidia h200", "AMD H200"})
        CHECK_MESSAGE(peak_flops(name, Dtype::kBf16) == 0, name);
}
