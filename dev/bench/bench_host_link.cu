// Time to make pinned memory, and speed of copies between it and the GPUs, all of them at once and the first one alone.
// A process for each GPU, as in training.
//
// "touch" writes to each page of as much memory in as many threads and pins nothing: the floor of pinned_alloc. The
// first line of a machine that provides memory on first use says what that takes, so it is measured once more after.
//   usage: bench_host_link [GiB for each GPU]     20 by default
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>

#include "dev/bench/bench_harness.h"
#include "llmc/base/system/threads.h"

namespace {

constexpr int64_t kCopy = 256 << 20;   // bytes
constexpr int kCopies = 64;

struct Shared {
    pthread_barrier_t barrier;
};

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds from when all processes begin until this one is done.
template <typename Work> double together(Shared* shared, Work&& work) {
    pthread_barrier_wait(&shared->barrier);
    const double begin = seconds();
    work();
    return seconds() - begin;
}

void touch(int64_t bytes) {
    void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                        0);
    CHECK(memory != MAP_FAILED, "no memory to touch");
    madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    std::atomic<int64_t> next{0};
    on_threads(16, [&] {
        constexpr int64_t kPart = 64 << 20;
        for (int64_t begin; (begin = next.fetch_add(kPart)) < bytes;)
            for (int64_t at = begin; at < std::min(bytes, begin + kPart); at += 4096)
                static_cast<char*>(memory)[at] = 1;
    });
    munmap(memory, static_cast<size_t>(bytes));
}

// GB/s each way.
double rate(Shared* shared, Ctx& in, Ctx& out, char* host, int64_t bytes, void* device, bool copies_in,
            bool copies_out) {
    const double s = together(shared, [&] {
        for (int i = 0; i < kCopies; i++) {
            char* const at = host + 2 * i * kCopy % (bytes - 2 * kCopy);
            if (copies_in) cuda::copy_to_device(in, device, at, kCopy);
            if (copies_out) cuda::copy_to_host(out, at + kCopy, static_cast<char*>(device) + kCopy, kCopy);
        }
        cuda::synchronize(in);
        cuda::synchronize(out);
    });
    return 1e-9 * kCopies * static_cast<double>(kCopy) / s;
}

int measure(Shared* shared, int gpu, int gpus, int64_t bytes) {
    const double first = together(shared, [&] { touch(bytes); }), again = together(shared, [&] { touch(bytes); });
    Ctx ctx, in, out;
    cuda::device_open(ctx, gpu);
    cuda::side_open(in, ctx);
    cuda::side_open(out, ctx);
    char* host = nullptr;
    const double pinned = together(shared, [&] { host = static_cast<char*>(cuda::pinned_alloc(bytes)); });
    void* device = cuda::device_alloc(2 * kCopy);
    rate(shared, in, out, host, bytes, device, true, true);   // warms up
    const double to = rate(shared, in, out, host, bytes, device, true, false),
                 from = rate(shared, in, out, host, bytes, device, false, true),
                 both = rate(shared, in, out, host, bytes, device, true, true);
    std::printf("%d of %d GPUs | %5.1f GiB | touch %6.2f s, again %5.2f s | pinned_alloc %5.2f s | in %5.1f, "
                "out %5.1f, both %5.1f GB/s each way\n", gpu, gpus, static_cast<double>(bytes) * 0x1p-30, first, again,
                pinned, to, from, both);
    cuda::pinned_free(host);
    cuda::device_free(device);
    cuda::side_close(in);
    cuda::side_close(out);
    cuda::device_close(ctx);
    return 0;
}

int measure_together(int gpus, int64_t bytes) {
    void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED, "no shared memory");
    auto* shared = static_cast<Shared*>(memory);
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &attributes, static_cast<unsigned>(gpus));
    for (int gpu = 0; gpu < gpus; gpu++) {
        if (fork() != 0) continue;
        alarm(600);   // if another process fails, this one waits for it at a barrier
        const int status = measure(shared, gpu, gpus, bytes);
        std::fflush(stdout);
        _exit(status);
    }
    int failed = 0;
    for (int status = 0; wait(&status) > 0;) failed |= status;
    return failed != 0;
}

}  // namespace

int main(int argc, char** argv) {
    const int64_t bytes = (argc > 1 ? std::atoll(argv[1]) : 20) << 30;
    if (bytes < 4 * kCopy) {
        std::fprintf(stderr, "usage: bench_host_link [GiB for each GPU, at least 1]\n");
        return 2;
    }
    // CUDA must not be used before the fork: a child asks for the number of GPUs.
    const pid_t asks = fork();
    if (asks == 0) _exit(cuda::device_count());
    int status = 0;
    waitpid(asks, &status, 0);
    const int gpus = WEXITSTATUS(status);
    if (gpus == 0) {
        std::fprintf(stderr, "bench_host_link: there is no GPU\n");
        return 2;
    }
    const int failed = measure_together(gpus, bytes);
    return gpus > 1 ? failed | measure_together(1, bytes) : failed;
}
