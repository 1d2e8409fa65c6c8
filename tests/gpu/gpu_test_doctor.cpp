// The checks of `doctor` that compute on the GPU pass, and fail if one element is changed.
#include "tests/support/doctest.h"

#include <memory>

#include "llmc/commands/doctor/doctor_items.h"

namespace doctor_test {

namespace {

Findings look(const std::string& corrupt, const std::string& name) {
    std::unique_ptr<Comm> comm = open_single();
    Patient patient(*comm);
    patient.options.corrupt = corrupt;
    patient.info = device::device_info(-1);
    patient.cuda_build = true;
    Findings found;
    for (const Item& item : doctor_items())
        if (std::string(item.name) == "GPU" || item.name == name) found = look_at(item, patient);
    return found;
}

}  // namespace

TEST_CASE("gpu doctor: matmuls of the recipes that run here and attention pass, and a changed element is reported") {
    const Findings recipes = look("", "recipe");
    const Findings sound = look("", "FP8 matmuls"), corrupted = look("FP8 matmuls", "FP8 matmuls");
    REQUIRE_EQ(recipes.size(), sound.size());
    for (size_t i = 0; i < recipes.size(); i++) {
        INFO(sound[i].name << ": " << sound[i].text);
        const bool runs = recipes[i].status == Status::kOk;
        CHECK(sound[i].status == (runs ? Status::kOk : Status::kNotChecked));
        CHECK(corrupted[i].status == (runs ? Status::kFailed : Status::kNotChecked));
    }
    for (const Finding& finding : look("", "attention")) {
        INFO(finding.text);
        CHECK(finding.status == Status::kOk);
    }
    CHECK(look("attention", "attention").at(0).status == Status::kFailed);
    // FP8 attention needs compute capability 9.0 and a build with sm_90a code.
    const DeviceInfo info = device::device_info(0);
    const Status fp8_attention = look("", "FP8 attention").at(0).status;
    INFO("FP8 attention: " << look("", "FP8 attention").at(0).text);
    CHECK(fp8_attention == (info.sm == 90 && info.sm90a_code ? Status::kOk : Status::kNotChecked));
    if (fp8_attention == Status::kOk)
        CHECK(look("FP8 attention", "FP8 attention").at(0).status == Status::kFailed);
}

TEST_CASE("gpu doctor: the device, its driver and its state are reported") {
    for (const char* name : {"GPU", "driver", "cuBLASLt"}) {
        const Findings findings = look("", name);
        INFO(name << ": " << findings.at(0).text);
        CHECK(findings.at(0).status == Status::kOk);
    }
    for (const Finding& finding : look("", "GPU state")) {
        INFO(finding.name << ": " << finding.text);
        CHECK_FALSE(finding.text.empty());
    }
}

}  // namespace doctor_test
