// Operands of the operation tests, each from a different random stream.
#pragma once
#include "tests/support/op_test.h"

namespace op_test {

struct Inputs {
    Dtype type, stat = stat_dtype(type);
    Ctx ctx{};
    uint64_t key = 0;
    HostTensor random(int64_t elems) { return random_tensor(type, elems, ++key); }
    HostTensor statistics(int64_t elems) { return random_tensor(stat, elems, ++key, 0.1, 1); }
    HostTensor empty(int64_t elems) { return HostTensor(type, elems); }
    HostTensor scratch(int64_t elems) { return HostTensor(stat, elems); }
};

}  // namespace op_test
