// Operands of the tests of the CPU's operations, each from a different random stream, and numbers of threads.
#pragma once
#include "llmc/cpu/threads.h"
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

// Checks that the tensors which run() returns have equal bits on any number of threads.
template <typename Run> void check_threads(Run&& run) {
    const int threads = cpu::thread_count();
    std::vector<HostTensor> one;
    for (int count : {1, 2, 5, 7}) {
        cpu::set_thread_count(count);
        const std::vector<HostTensor> all = run();
        if (one.empty()) one = all;
        for (size_t i = 0; i < all.size(); i++) {
            INFO(count << " threads, output " << i);
            CHECK(all[i].same_bits(one[i]));
            CHECK(all[i].guards_intact());
        }
    }
    cpu::set_thread_count(threads);
}

}  // namespace op_test
