// Threads of the CPU operations. A build without OpenMP (for the thread sanitizer) uses one.
#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif

namespace cpu {

#ifdef _OPENMP
inline int thread_count() { return omp_get_max_threads(); }
inline int thread_index() { return omp_get_thread_num(); }
inline void set_thread_count(int count) { omp_set_num_threads(count); }
#else
inline int thread_count() { return 1; }
inline int thread_index() { return 0; }
inline void set_thread_count(int) {}
#endif

}  // namespace cpu
