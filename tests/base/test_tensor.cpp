#include "tests/support/doctest.h"

#include "llmc/base/dtype.h"

// A kernel that took the address of an optional tensor without elements for a tensor added other memory to gradients.
TEST_CASE("tensor: without elements its pointer is null, whatever memory it is in") {
    float memory[2] = {};
    const Tensor all{memory, Dtype::kFp32, 2};
    CHECK(all.as<float>() == memory);
    CHECK(all.slice(1, 1).as<float>() == memory + 1);
    CHECK(all.slice(1, 0).as<float>() == nullptr);
    CHECK(Tensor{memory, Dtype::kFp32, 0}.as<double>() == nullptr);   // empty ones need not be of the type
}
