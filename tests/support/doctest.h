// doctest with its short macro names. The project's own CHECK, REQUIRE and FAIL have the same names: headers that use
// them come first, then tests get doctest's. Include this before any other header of the project.
#pragma once
#include "llmc/base/check.h"
#include "llmc/base/dtype.h"
#undef CHECK
#undef REQUIRE
#undef FAIL
#include <doctest/doctest.h>

// CAPTURE of several values.
#undef CAPTURE
#define CAPTURE(...) INFO(#__VA_ARGS__ " := ", values_text(__VA_ARGS__))
template <typename... Values> std::string values_text(const Values&... values) {
    std::string text;
    ((text += (text.empty() ? "" : ", ") + std::string(doctest::toString(values).c_str())), ...);
    return text;
}

// The message of the error with exit code 2 that body() raises, or "".
template <typename Body> std::string refusal_of(Body&& body) {
    try {
        body();
        return "";
    } catch (const Error& error) {
        CHECK_MESSAGE(error.exit_code == kExitBadInput, error.what());
        return error.what();
    }
}
