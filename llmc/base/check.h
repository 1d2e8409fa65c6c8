// Errors: the exception type, which carries the exit code, and macros that throw it.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "llmc/base/text.h"

// Exit codes of the process. mpirun returns the first non-zero one.
enum ExitCode : int {
    kExitOk = 0,               // finished, or stopped cleanly
    kExitBug = 1,              // an internal invariant is broken
    kExitBadInput = 2,         // bad option, file or data
    kExitFp8NotEffective = 3,  // FP8 was requested and did not run
    kExitDiverged = 4,         // too many skipped steps
    kExitNoCheckpoint = 5,     // no usable checkpoint
    kExitPeerLost = 6,         // a rank was lost or hangs
    kExitDisk = 7,             // disk full or write error
};

struct Error : std::runtime_error {
    int exit_code;
    // The message becomes one line that can be printed, whatever it quotes (message_line).
    Error(int code, const std::string& message) : std::runtime_error(message_line(message)), exit_code(code) {}
};

// printf into a std::string.
[[gnu::format(printf, 1, 2)]] inline std::string strf(const char* format, ...) {
    va_list args, copy;
    va_start(args, format);
    va_copy(copy, args);
    std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, format, copy)), '\0');
    va_end(copy);
    std::vsnprintf(text.data(), text.size() + 1, format, args);
    va_end(args);
    return text;
}

// For %lld, and for sizes in GiB.
constexpr long long ll(int64_t x) { return x; }
constexpr double kGiB = 0x1p30;
constexpr double gib(int64_t bytes) { return static_cast<double>(bytes) / kGiB; }

// Raise an Error. The message is one line: what is wrong, the value, the fix.
#define FAIL(exit_code, ...) throw Error(exit_code, strf(__VA_ARGS__))

// CHECK: an internal invariant (exit 1). REQUIRE: something that the user controls (exit 2).
#define CHECK(condition, ...)                                                                       \
    do {                                                                                            \
        if (!(condition))                                                                           \
            throw Error(kExitBug, strf("%s:%d: CHECK(%s) failed: ", __FILE__, __LINE__, #condition) \
                                      + strf(__VA_ARGS__));                                         \
    } while (0)
#define REQUIRE(condition, ...)                                          \
    do {                                                                 \
        if (!(condition)) throw Error(kExitBadInput, strf(__VA_ARGS__)); \
    } while (0)
