// Preloaded into a rank: once MPI is initialised, no thread can be started, as under a limit on memory or processes.
#include <dlfcn.h>
#include <pthread.h>

#include <cerrno>

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                              void* argument) {
    using Initialized = int (*)(int*);
    using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    static const auto initialized = reinterpret_cast<Initialized>(::dlsym(RTLD_DEFAULT, "MPI_Initialized"));
    static const auto create = reinterpret_cast<Create>(::dlsym(RTLD_NEXT, "pthread_create"));
    int yes = 0;
    if (initialized && initialized(&yes) == 0 && yes) return EAGAIN;
    return create(thread, attributes, start, argument);
}
