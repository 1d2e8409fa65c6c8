// What `doctor` finds on a GPU: the device and its driver, and that operations compute as on the CPU.
#include "llmc/commands/doctor/doctor.h"

#include "tests/support/doctest.h"

TEST_CASE("gpu doctor: the device, its driver and its operations pass") {
    const std::unique_ptr<Comm> comm = open_single();
    Doctor doctor(*comm);
    const std::string checked[] = {"GPU", "driver", "FP8", "experts", "attention"};
    for (const Doctor::Check& check : Doctor::checks())
        for (const CheckResult& result : doctor.results_of(check)) {
            INFO(result.line());
            CHECK_FALSE(result.text.empty());
            // A recipe that does not run on this GPU is a warning.
            if (std::find(std::begin(checked), std::end(checked), check.name) != std::end(checked))
                CHECK((result.status == Status::kOk || result.name.starts_with("FP8 ")));
            if (result.name.starts_with("FP8 ") && result.status != Status::kOk)
                CHECK_NE(result.text.find("needs"), std::string::npos);
        }
}
