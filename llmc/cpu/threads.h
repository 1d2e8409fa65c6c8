// Threads of the CPU operations. A build without OpenMP (for the thread sanitizer) uses one.
#pragma once
#ifdef _OPENMP
#include <omp.h>

#include <atomic>
#endif

namespace cpu {

#ifdef _OPENMP
inline int thread_count() { return omp_get_max_threads(); }
inline int thread_index() { return omp_get_thread_num(); }
inline void set_thread_count(int count) { omp_set_num_threads(count); }
// Starts OpenMP's threads, which then stay. Call it before memory is used: if OpenMP finds too little memory for a
// thread (ulimit -v), it ends the process without a proper error.
inline void start_threads() {
    std::atomic<int> started{0};   // work, so that the compiler keeps the region
#pragma omp parallel
    started++;
}
#else
inline int thread_count() { return 1; }
inline int thread_index() { return 0; }
inline void set_thread_count(int) {}
inline void start_threads() {}
#endif

}  // namespace cpu
