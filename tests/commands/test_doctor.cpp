// `doctor`: what is judged of results, of the machine and of several ranks.
#include "llmc/commands/doctor/doctor.h"

#include <cmath>
#include <map>

#include "tests/support/doctest.h"
#include "tests/support/local_ranks.h"

#ifndef LLMC_CUDA
namespace {

// This rank's results of all checks up to one, by name.
std::map<std::string, CheckResult> results_until(const std::string& last, Comm& comm) {
    Doctor doctor(comm);
    std::map<std::string, CheckResult> results;
    for (const Doctor::Check& check : Doctor::checks()) {
        for (const CheckResult& result : doctor.results_of(check)) results[result.name] = result;
        if (check.name == last) break;
    }
    return results;
}

}  // namespace

TEST_CASE("doctor: without a GPU operations are checked, and the output lists what could not be") {
    const std::unique_ptr<Comm> comm = open_single();
    auto results = results_until("shared memory", *comm);
    for (const char* name : {"FP8 delayed", "FP8 tensorwise", "FP8 blockwise", "experts", "attention", "build"}) {
        INFO(name << ": " << results[name].text);
        CHECK(results[name].status == Status::kOk);
    }
    for (const char* name : {"GPU", "driver", "GPU state", "NCCL", "ranks", "collectives", "links", "disk"}) {
        INFO(name << ": " << results[name].text);
        CHECK(results[name].status == Status::kNotChecked);
    }
}

namespace {

// Sums of the last rank have one wrong element.
class WrongSums : public LocalExchange {
public:
    using LocalExchange::LocalExchange;
    void sum(Ctx& ctx, Tensor values) override {
        LocalExchange::sum(ctx, values);
        if (world().rank + 1 == world().ranks && values.dtype == Dtype::kFp32) values.as<float>()[values.elems / 2]++;
    }
};

}  // namespace

TEST_CASE("doctor: a wrong sum of one rank fails there, and only there") {
    LocalRanks ranks(3);
    ranks.run([&](Comm& comm) {
        InOrder<WrongSums> sums(static_cast<LocalComm&>(comm).all(), comm.world().rank);
        auto results = results_until("collectives", sums);
        CHECK_EQ(results["ranks"].text, "3 ranks on 1 host, one executable");
        const CheckResult& found = results["collectives"];
        CHECK(found.status == (comm.world().rank == 2 ? Status::kFailed : Status::kOk));
        if (comm.world().rank == 2)
            CHECK_EQ(found.text, "all-reduce: element 1504 is 2977, and the sum on the host 2976");
    });
}
#endif

TEST_CASE("doctor: a result that differs by more than its share of the largest value, or is NaN, is reported") {
    const std::vector<float> cpu = {1, -16, 3};
    CHECK_EQ(result_difference("y", cpu, cpu, 0.1), "");
    CHECK_EQ(result_difference("y", {2.5f, -17.5f, 1.5f}, cpu, 0.1), "");
    CHECK_EQ(result_difference("y", {1, -16, 4.7f}, cpu, 0.1), "y: element 2 of 3 is 4.69999981, on the CPU 3");
    CHECK_NE(result_difference("y", {NAN, -16, 3}, cpu, 0.1), "");
    CHECK_NE(result_difference("y", {1, -18, 3}, cpu, 0.1), "");
}

TEST_CASE("doctor: a check that throws has failed") {
    const std::unique_ptr<Comm> comm = open_single();
    Doctor doctor(*comm, "/dev/null/below");
    for (const Doctor::Check& check : Doctor::checks())
        if (std::string(check.name) == "disk") CHECK(doctor.results_of(check).at(0).status == Status::kFailed);
}

TEST_CASE("doctor: results of several ranks are merged by name and status") {
    const auto result = [](const char* name, Status status, const char* text, const char* advice = "") {
        return CheckResult{status, text, advice, name};
    };
    const std::vector<CheckResults> ranks = {
        {result("x", Status::kOk, "fine"), result("y", Status::kOk, "own 0"), result("l", Status::kOk, "a \xff")},
        {result("x", Status::kOk, "fine"), result("y", Status::kOk, "own 1"), result("z", Status::kWarning, "hot")},
        {result("x", Status::kFailed, "broken", "mend\nit"), result("y", Status::kOk, "own 2")}};
    std::vector<std::string> texts;
    for (const CheckResults& results : ranks) texts.push_back(results_to_json(results));
    const CheckResults all = merged(texts, {"a", "a", "b"});
    REQUIRE_EQ(all.size(), 5);
    CHECK_EQ(all[0].text, "rank 0 (a): fine; ok on 2 of 3 ranks");
    CHECK_EQ(all[1].text, "rank 0 (a): own 0; ok on 3 of 3 ranks");
    CHECK_EQ(all[3].line(), "warning      z                  rank 1 (a): hot\n");
    CHECK_EQ(all[4].line(), "failed       x                  rank 2 (b): broken -> mend it\n");
    CHECK_EQ(all[4].line(true), "\x1b[31mfailed     \x1b[0m  x                  rank 2 (b): broken -> mend it\n");
    CHECK_EQ(all[4].rank, 2);
    // A result that all ranks share names no rank; two of the same name and status are both kept.
    const std::string twice = results_to_json({result("links", Status::kOk, "one"),
                                               result("links", Status::kOk, "two")});
    const CheckResults same = merged({twice, twice, twice}, {"a", "a", "b"});
    REQUIRE_EQ(same.size(), 2);
    CHECK_EQ(same[0].text, "one");
    CHECK_EQ(same[1].text, "two");
    CHECK_EQ(same[1].rank, -1);
}

TEST_CASE("doctor: shared memory") {
    constexpr int64_t kMiB = 1 << 20;
    CHECK(shared_memory_result(16384 * kMiB, 8).status == Status::kOk);
    CHECK(shared_memory_result(64 * kMiB, 8).status == Status::kWarning);   // Docker's default
    CHECK(shared_memory_result(0, 2).status == Status::kFailed);
    CHECK(shared_memory_result(0, 1).status == Status::kWarning);
}

TEST_CASE("doctor: the state of a GPU") {
    GpuState sound;
    sound.persistence = sound.ecc = true, sound.mig = false, sound.uncorrected_errors = 0, sound.celsius = 31;
    sound.sm_mhz = 345, sound.max_sm_mhz = 1980, sound.memory_mhz = sound.max_memory_mhz = 3201;
    sound.throttle = 0x1 | kThrottlePowerCap, sound.power_limit_mw = sound.default_power_limit_mw = 700000;
    for (const CheckResult& result : gpu_state_results(sound)) {
        INFO(result.name << ": " << result.text);
        CHECK(result.status == Status::kOk);
    }
    auto status_of = [](const GpuState& state, const std::string& name) {
        for (const CheckResult& result : gpu_state_results(state))
            if (result.name == name) return result.status;
        return Status::kNotChecked;
    };
    GpuState s = sound;
    s.uncorrected_errors = 2;
    CHECK(status_of(s, "GPU ECC") == Status::kFailed);
    s.ecc = false;
    CHECK(status_of(s, "GPU ECC") == Status::kWarning);
    s.mig = true, s.persistence = false, s.power_limit_mw = 500000;
    for (const char* name : {"GPU MIG", "GPU persistence", "GPU power"}) CHECK(status_of(s, name) == Status::kWarning);
    for (const uint64_t bit : {kThrottleClocksSet, kThrottleHardware, kThrottleSoftwareThermal,
                               kThrottleHardwareThermal, kThrottlePowerBrake}) {
        s.throttle = bit;
        CHECK(status_of(s, "GPU clocks") == Status::kWarning);
    }
    CHECK_EQ(gpu_state_results({}).size(), 1);   // a driver that reports nothing
    GpuState none;
    CHECK_NE(read_gpu_state("0000:01:00.0", none, "libno-such-library.so.1").find("cannot be opened"),
             std::string::npos);
    CHECK_EQ(read_gpu_state("0000:01:00.0", none, "libm.so.6"), "nvmlInit_v2 returns -1");   // no NVML
}
