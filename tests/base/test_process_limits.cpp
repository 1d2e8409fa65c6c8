// The conversion of C++ exceptions to errors with an exit code and a remedy. The effect of limits on a run is tested
// with the executable, in tests/end_to_end/test_environment_faults.py.
#include <new>
#include <stdexcept>
#include <system_error>

#include "llmc/base/system/process_limits.h"
#include "tests/support/doctest.h"

namespace {
void check(const std::exception& exception, int exit_code, const std::string& part) {
    const Error error = as_error(exception);
    CAPTURE(error.what());
    CHECK(error.exit_code == exit_code);
    CHECK(std::string(error.what()).find(part) != std::string::npos);
}
}  // namespace

TEST_CASE("process limits: the error of an exception for lack of memory or threads says so") {
    check(std::bad_alloc(), kExitBadInput, "out of memory on the host: free some");
    check(std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again)), kExitBadInput,
          "a thread cannot be started: raise the limit on processes (ulimit -u");
}

TEST_CASE("process limits: an Error is unchanged, and any other exception is a bug") {
    check(Error(kExitDisk, "no space"), kExitDisk, "no space");
    check(std::runtime_error("unknown"), kExitBug, "unknown");
    check(std::system_error(std::make_error_code(std::errc::no_such_process)), kExitBug, "No such process");
}
