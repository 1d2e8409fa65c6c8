// The items of `doctor` on the CPU device: computed results pass, and fail if one element is changed; findings on
// ranks and the machine are judged correctly.
#include "tests/support/doctest.h"

#include <memory>

#include "llmc/commands/doctor/doctor_items.h"
#include "llmc/config/environment.h"

namespace {

struct Examined {
    std::unique_ptr<Comm> comm = open_single();
    Patient patient{*comm};
    Examined(const DoctorOptions& options = {}) {
        patient.options = options;
        patient.info = device::device_info(-1);
        look("GPU");   // opens it
    }
    Findings look(const std::string& name) {
        for (const Item& item : doctor_items())
            if (name == item.name) return look_at(item, patient);
        return {};
    }
};

std::string error_of(const std::vector<std::string>& words) {
    try {
        doctor_options(words);
    } catch (const Error& error) {
        CHECK_EQ(error.exit_code, kExitBadInput);
        CHECK_EQ(std::string(error.what()).find('\n'), std::string::npos);
        return error.what();
    }
    return "";
}

Finding named(Finding finding, const std::string& name) {
    finding.name = name;
    return finding;
}

}  // namespace

#ifndef LLMC_CUDA
TEST_CASE("doctor: matmuls of every recipe and attention pass, and a changed element is reported") {
    Examined sound;
    Findings findings = sound.look("FP8 matmuls");
    REQUIRE_EQ(findings.size(), 3);
    for (const char* name : {"attention", "FP8 attention"}) findings.push_back(sound.look(name).at(0));
    for (const Finding& finding : findings) {
        INFO(finding.name << ": " << finding.text);
        CHECK(finding.status == Status::kOk);
    }
    CHECK_EQ(findings[0].name, "FP8 delayed");
    CHECK_EQ(findings[2].name, "FP8 blockwise");

    Examined fp8({.save = "", .corrupt = "FP8 matmuls"});
    for (const Finding& finding : fp8.look("FP8 matmuls")) {
        INFO(finding.name << ": " << finding.text);
        CHECK(finding.status == Status::kFailed);
        CHECK_NE(finding.text.find("fprop: element 5760 of 11520"), std::string::npos);
    }
    CHECK(fp8.look("attention").at(0).status == Status::kOk);
    Examined attention({.save = "", .corrupt = "attention"});
    CHECK(attention.look("attention").at(0).status == Status::kFailed);
    CHECK(attention.look("FP8 matmuls").at(0).status == Status::kOk);
    CHECK(attention.look("FP8 attention").at(0).status == Status::kOk);
    Examined fp8_attention({.save = "", .corrupt = "FP8 attention"});
    const Finding wrong = fp8_attention.look("FP8 attention").at(0);
    CHECK(wrong.status == Status::kFailed);
    CHECK_NE(wrong.text.find("head size 64: out: element 16512 of 33024"), std::string::npos);
    CHECK_EQ(wrong.advice, "do not use --fp8-attention here; run make test-gpu");
    CHECK(fp8_attention.look("attention").at(0).status == Status::kOk);
}

TEST_CASE("doctor: FP8 attention is not checked on another compute capability, and the line says why") {
    Examined doctor;
    doctor.patient.info.sm = 100;
    CHECK(doctor.look("FP8 attention").at(0).status == Status::kNotChecked);
    CHECK_NE(doctor.look("FP8 attention").at(0).text.find("for compute capability 9.0, found 10.0"), std::string::npos);
    doctor.patient.info.sm = 90;   // of a build without its code
    CHECK(doctor.look("FP8 attention").at(0).status == Status::kNotChecked);
    CHECK_NE(doctor.look("FP8 attention").at(0).text.find("make ARCH=90a"), std::string::npos);
}

TEST_CASE("doctor: without a GPU and with one rank the output lists what could not be checked") {
    Examined doctor;
    for (const char* name : {"GPU", "driver", "cuBLASLt", "recipe", "GPU state", "NCCL", "ranks", "collectives",
                             "links", "disk"}) {
        INFO(name);
        const Findings findings = doctor.look(name);
        CHECK_FALSE(findings.empty());
        for (const Finding& finding : findings) CHECK(finding.status == Status::kNotChecked);
    }
}
#endif

TEST_CASE("doctor: an item without a device is not checked, one that throws has failed") {
    std::unique_ptr<Comm> comm = open_single();
    Patient patient(*comm);
    for (const Finding& finding : look_at_fp8_matmuls(patient)) CHECK(finding.status == Status::kNotChecked);
    CHECK(look_at_attention(patient).at(0).status == Status::kNotChecked);
    CHECK(look_at_fp8_attention(patient).at(0).status == Status::kNotChecked);
    const Item item{"item", "", [](Patient&) -> Findings { throw Error(kExitBadInput, "no such thing"); }};
    const Findings findings = look_at(item, patient);
    REQUIRE_EQ(findings.size(), 1);
    CHECK(findings[0].status == Status::kFailed);
    CHECK_EQ(findings[0].text, "no such thing");
    CHECK_EQ(findings[0].name, "item");
}

TEST_CASE("doctor: options") {
    const DoctorOptions options = doctor_options({"--json", "--save", "out", "--corrupt=attention"});
    CHECK(options.json);
    CHECK_EQ(options.save, "out");
    CHECK_EQ(options.corrupt, "attention");
    CHECK_EQ(doctor_options({"--save=a=b"}).save, "a=b");
    CHECK_EQ(error_of({"--jsno"}), "doctor has no option --jsno: did you mean --json?");
    CHECK_EQ(error_of({"--json=1"}), "--json takes no value");
    CHECK_EQ(error_of({"--save"}), "--save needs a value");
    CHECK_EQ(error_of({"--save", "--json"}), "--save needs a value");
    CHECK_EQ(error_of({"--corrupt", "links"}), "--corrupt links: no such item; did you mean attention?");
    CHECK_NE(error_of({"here"}), "");
}

TEST_CASE("doctor: of the findings of several ranks the worst is reported") {
    const std::vector<std::string> hosts = {"a", "a", "b"};
    const Findings good = {named(ok("fine"), "x"), named(ok("own 0"), "y")};
    const Findings other = {named(ok("fine"), "x"), named(ok("own 1"), "y"), named(warning("hot", "cool it"), "z")};
    const Findings bad = {named(failed("broken", "mend it"), "x"), named(ok("own 2"), "y")};
    const Findings all = merged({good, other, bad}, hosts);
    REQUIRE_EQ(all.size(), 3);
    CHECK(all[0].status == Status::kFailed);
    CHECK_EQ(all[0].text, "rank 2 (b): broken");
    CHECK_EQ(all[0].advice, "mend it");
    CHECK_EQ(all[0].rank, 2);
    CHECK_EQ(all[1].text, "rank 0 (a): own 0; ok on 3 of 3 ranks");
    CHECK(all[2].status == Status::kWarning);
    CHECK_EQ(all[2].text, "rank 1 (a): hot");
    // A finding that all ranks share names no rank; two findings of the same name are both kept.
    const Findings twice = {named(ok("one"), "links"), named(ok("two"), "links")};
    const Findings same = merged({twice, twice, twice}, hosts);
    REQUIRE_EQ(same.size(), 2);
    CHECK_EQ(same[0].text, "one");
    CHECK_EQ(same[1].text, "two");
    CHECK_EQ(same[1].rank, -1);
    // From bad to good: failed, warning, not checked, ok.
    const auto worst = [&](Finding a, Finding b) { return merged({{a}, {b}}, hosts).at(0).status; };
    CHECK(worst(warning("", ""), not_checked("")) == Status::kWarning);
    CHECK(worst(ok(""), not_checked("")) == Status::kNotChecked);
    CHECK(worst(failed("", ""), warning("", "")) == Status::kFailed);
}

TEST_CASE("doctor: findings sent between ranks, and the printed lines") {
    const Findings findings = {named(warning("a \"quoted\" \xff line", "do\nit"), "x"), named(ok("b"), "y")};
    const Findings again = findings_from_json(findings_to_json(findings));
    REQUIRE_EQ(again.size(), 2);
    CHECK(again[0].status == Status::kWarning);
    CHECK_EQ(again[0].advice, "do\nit");
    CHECK_EQ(again[1].name, "y");
    CHECK_EQ(Report::line(named(warning("hot", "cool\nit"), "GPU")),
             "warning      GPU                hot -> cool it\n");
    Report report;
    const Item item{"x", "looks", nullptr};
    report.add(item, findings);
    CHECK_FALSE(report.failed());
    CHECK_EQ(report.last_line(), "doctor: usable, with warnings: 1 ok, 1 warning, 0 failed, 0 not checked\n");
    report.add(item, {failed("c", "")});
    CHECK(report.failed());
    CHECK_EQ(report.last_line(), "doctor: failed: 1 ok, 1 warning, 1 failed, 0 not checked\n");
}

TEST_CASE("doctor: limits of the machine") {
    constexpr int64_t kMiB = 1 << 20, kGiB = 1 << 30;
    CHECK(shared_memory_finding(32 * kGiB, 16 * kGiB, 8).status == Status::kOk);
    CHECK(shared_memory_finding(64 * kMiB, 64 * kMiB, 8).status == Status::kWarning);   // Docker's default
    CHECK(shared_memory_finding(kGiB, 0, 2).status == Status::kFailed);
    CHECK(shared_memory_finding(kGiB, 0, 1).status == Status::kWarning);
    CHECK(locked_memory_finding(-1, true).status == Status::kOk);
    CHECK(locked_memory_finding(8 * kMiB, false).status == Status::kOk);
    CHECK(locked_memory_finding(8 * kMiB, true).status == Status::kWarning);
    CHECK(open_files_finding(-1, 64).status == Status::kOk);
    CHECK(open_files_finding(1024, 8).status == Status::kOk);
    CHECK(open_files_finding(1024, 64).status == Status::kWarning);
    CHECK(open_files_finding(1023, 1).status == Status::kWarning);
}

TEST_CASE("doctor: the state of a GPU") {
    const GpuState sound{.persistence = true, .mig = false, .ecc = true, .uncorrected_errors = 0, .sm_mhz = 345,
                         .max_sm_mhz = 1980, .memory_mhz = 3201, .max_memory_mhz = 3201,
                         .throttle = 0x1 | kThrottlePowerCap, .power_limit_mw = 700000,
                         .default_power_limit_mw = 700000, .celsius = 31};
    for (const Finding& finding : gpu_state_findings(sound)) {
        INFO(finding.name << ": " << finding.text);
        CHECK(finding.status == Status::kOk);
    }
    auto status_of = [](const GpuState& state, const std::string& name) {
        for (const Finding& finding : gpu_state_findings(state))
            if (finding.name == name) return finding.status;
        return Status::kNotChecked;
    };
    GpuState s = sound;
    s.uncorrected_errors = 2;
    CHECK(status_of(s, "GPU ECC") == Status::kFailed);
    s.ecc = false;
    CHECK(status_of(s, "GPU ECC") == Status::kWarning);
    s.mig = true, s.persistence = false, s.power_limit_mw = 500000;
    CHECK(status_of(s, "GPU MIG") == Status::kWarning);
    CHECK(status_of(s, "GPU persistence") == Status::kWarning);
    CHECK(status_of(s, "GPU power") == Status::kWarning);
    for (const uint64_t bit : {kThrottleClocksSet, kThrottleHardware, kThrottleSoftwareThermal,
                               kThrottleHardwareThermal, kThrottlePowerBrake}) {
        s.throttle = bit;
        CHECK(status_of(s, "GPU clocks") == Status::kWarning);
    }
    CHECK_EQ(gpu_state_findings({}).size(), 1);   // a driver that reports nothing
    GpuState none;
    CHECK_NE(read_gpu_state("0000:01:00.0", none, "libno-such-library.so.1").find("cannot be opened"),
             std::string::npos);
    CHECK_EQ(read_gpu_state("0000:01:00.0", none, "libm.so.6"), "nvmlInit_v2 returns -1");   // no NVML
}

TEST_CASE("doctor: the driver's version in both formats of its text") {
    CHECK_EQ(kernel_driver_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun\nGCC version: 9.4"),
             "535.183.01");
    CHECK_EQ(kernel_driver_version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release"),
             "580.65.06");
    CHECK_EQ(kernel_driver_version(""), "");
}

TEST_CASE("doctor: which variables deserve a warning") {
    const auto effects = environment_effects({"NVTE_FP8_ALLREDUCE=1", "NCCL_DEBUG=INFO",
                                              "CUDA_DEVICE_MAX_CONNECTIONS=1", "OMP_NUM_THREADS=4"}, 2, true);
    REQUIRE_EQ(effects.size(), 3);
    CHECK_EQ(effects[0].name, "CUDA_DEVICE_MAX_CONNECTIONS");
    CHECK(effects[0].warn);
    CHECK_FALSE(effects[1].warn);
    CHECK_EQ(effects[1].value, "INFO");
    CHECK(effects[2].warn);
    CHECK_FALSE(environment_effects({"CUDA_DEVICE_MAX_CONNECTIONS=8"}, 2, true).at(0).warn);
}
