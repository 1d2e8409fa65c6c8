// Exceptions of the C++ library as errors with an exit code and a way out. What limits do to a run is tested on the
// executable, by tests/end_to_end/test_environment_faults.py.
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

TEST_CASE("process limits: exceptions for want of memory or threads say so") {
    check(std::bad_alloc(), kExitBadInput, "out of memory on the host: free some");
    check(std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again)), kExitBadInput,
          "a thread cannot be started: raise the limit on processes (ulimit -u");
}

TEST_CASE("process limits: errors stay as they are, and what is left is a bug") {
    check(Error(kExitDisk, "no space"), kExitDisk, "no space");
    check(std::runtime_error("unknown"), kExitBug, "unknown");
    check(std::system_error(std::make_error_code(std::errc::no_such_process)), kExitBug, "No such process");
}
