// Items of `doctor` on the machine around the device: processors, environment, disk and limits.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>

#include "llmc/base/check.h"
#include "llmc/base/system/files.h"
#include "llmc/base/text.h"
#include "llmc/base/version.h"
#include "llmc/commands/doctor/doctor_items.h"
#include "llmc/config/environment.h"
#include "llmc/parallel/comm/comm_mpi.h"
#include "llmc/parallel/rank_preflight.h"

namespace {

constexpr int64_t kMiB = 1 << 20;
// Docker's default is 64 MiB; NCCL takes some MiB of shared memory for each pair of ranks of a host.
constexpr int64_t kSharedMemoryBytes = 512 * kMiB;
// A network adapter locks the memory that it uses; NCCL has buffers of some MiB for each connection.
constexpr int64_t kLockedBytes = 1024 * kMiB;
constexpr int64_t kOpenFiles = 1024, kOpenFilesOfRanks = 4096;
constexpr int64_t kLittleDisk = 4096 * kMiB;   // a few checkpoints of a small model

std::string size_text(int64_t bytes) {
    return bytes < 1024 * kMiB ? strf("%.1f MiB", static_cast<double>(bytes) / static_cast<double>(kMiB))
                               : strf("%.1f GiB", gib(bytes));
}

// The soft limit, -1 for none.
int64_t limit_of(decltype(RLIMIT_NOFILE) resource) {
    rlimit limit{};
    if (::getrlimit(resource, &limit) != 0) FAIL(kExitBadInput, "getrlimit: %s", std::strerror(errno));
    return limit.rlim_cur == RLIM_INFINITY ? -1 : static_cast<int64_t>(limit.rlim_cur);
}

bool has_infiniband() {
    std::error_code error;
    return !std::filesystem::is_empty("/sys/class/infiniband", error) && !error;
}

// Creates a file in /dev/shm, as OpenMPI and NCCL do between the ranks of a host. Returns "" or the error.
std::string shared_memory_error() {
    const std::string name = strf("/llmfp8.doctor.%d", static_cast<int>(::getpid()));
    const int fd = ::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return std::strerror(errno);
    ::close(fd);
    ::shm_unlink(name.c_str());
    return "";
}

}  // namespace

Findings look_at_build(Patient& patient) {
    const std::string mpi = mpi_library_text();
    return {ok(strf("commit %s for %s, %s", kBuildCommit,
                    patient.cuda_build ? ("CUDA " + patient.info.toolkit).c_str() : "the CPU",
                    mpi.empty() ? "one rank only (built without OpenMPI)" : "one or more ranks"))};
}

Findings look_at_processors(Patient& patient) {
    cpu_set_t usable;
    CPU_ZERO(&usable);
    const bool known = ::sched_getaffinity(0, sizeof usable, &usable) == 0;   // fails beyond 1024 processors
    const int all = static_cast<int>(std::thread::hardware_concurrency());
    const int mine = known ? CPU_COUNT(&usable) : all;
    const long of_host = ::sysconf(_SC_NPROCESSORS_ONLN);
    const std::string text = strf("%d of the host's %ld may be used by this process", mine, of_host);
    if (mine >= 2 || of_host < 2) return {ok(text)};
    const bool launched = patient.comm.world().ranks > 1;
    return {warning(text + ": reading data, saving and training share it",
                    launched ? "give mpirun --bind-to none, or srun --cpus-per-task" : "see taskset -p $$")};
}

Findings look_at_environment(Patient& patient) {
    Findings findings;
    const int ranks = patient.comm.world().ranks;
    for (const VariableEffect& e : environment_effects(own_environment(), ranks, patient.cuda_build)) {
        const std::string text = "\"" + e.value + "\" is " + e.effect;
        findings.push_back(e.warn ? warning(text, "unset " + e.name) : ok(text));
        findings.back().name = "environment " + e.name;
    }
    for (const std::string& line : environment_differences(patient.comm)) {
        const std::string what = line.substr(line.find(' ') + 1);   // after "WARNING:"
        findings.push_back(warning(what, "start all ranks with the same environment (mpirun -x)"));
        findings.back().name = "environment of ranks";
    }
    if (findings.empty()) findings = {ok("no variable of NCCL, Transformer Engine or this trainer is set")};
    return findings;
}

Findings look_at_disk(Patient& patient) {
    if (patient.options.save.empty())
        return {not_checked("--save DIR checks the folder in which checkpoints will be saved", "")};
    const std::string folder = patient.options.save, there = existing_part(folder);
    if (!is_directory(there)) return {failed(printable(there) + " is not a folder", "name another one")};
    if (::access(there.c_str(), W_OK | X_OK) != 0)
        return {failed(strf("%s cannot be written: %s", printable(there).c_str(), std::strerror(errno)),
                       "name another folder, or change its permissions")};
    const int64_t free = free_bytes(there);
    const std::string text = size_text(free) + " are free for " + printable(folder);
    const std::string need = "a checkpoint takes 14 bytes per parameter with FP32 moments";
    if (free >= kLittleDisk) return {ok(text + "; " + need)};
    return {warning(text, "make room: " + need + ", and the previous one is kept until the next is complete")};
}

Finding shared_memory_finding(int64_t total_bytes, int64_t free_bytes, int ranks) {
    const std::string text = strf("/dev/shm has %s, %s are free", size_text(total_bytes).c_str(),
                                  size_text(free_bytes).c_str());
    if (free_bytes >= kSharedMemoryBytes) return ok(text);
    const std::string advice = "docker run --shm-size 1g or --ipc host; remove old files from /dev/shm";
    if (free_bytes < kMiB && ranks > 1) return failed(text + ": the ranks of a host cannot share heartbeats", advice);
    return warning(text + ": too little for NCCL between several GPUs of a host", advice);
}

Findings look_at_shared_memory(Patient& patient) {
    struct statvfs info{};
    if (::statvfs("/dev/shm", &info) != 0)
        return {failed(strf("/dev/shm: %s", std::strerror(errno)), "mount a tmpfs there")};
    if (const std::string error = shared_memory_error(); !error.empty())
        return {failed("no file can be created in /dev/shm: " + error, "mount a tmpfs there that this user can write")};
    const auto block = static_cast<int64_t>(info.f_frsize);
    return {shared_memory_finding(static_cast<int64_t>(info.f_blocks) * block,
                                  static_cast<int64_t>(info.f_bavail) * block, patient.comm.world().ranks)};
}

Finding locked_memory_finding(int64_t bytes, bool infiniband) {
    if (bytes < 0) return ok("no limit (ulimit -l)");
    const std::string text = size_text(bytes) + " (ulimit -l)";
    if (bytes >= kLockedBytes || !infiniband)
        return ok(text + (infiniband ? "" : "; there is no InfiniBand, which would need it"));
    return warning(text + ": too little for InfiniBand, whose buffers are locked",
                   "ulimit -l unlimited; docker run --ulimit memlock=-1; under Slurm LimitMEMLOCK=infinity of slurmd");
}

Findings look_at_locked_memory(Patient&) {
    return {locked_memory_finding(limit_of(RLIMIT_MEMLOCK), has_infiniband())};
}

Finding open_files_finding(int64_t files, int ranks) {
    if (files < 0) return ok("no limit (ulimit -n)");
    const int64_t needed = ranks > 8 ? kOpenFilesOfRanks : kOpenFiles;
    const std::string text = strf("%lld (ulimit -n)", ll(files));
    if (files >= needed) return ok(text);
    return warning(text + strf(": data shards, and sockets between ranks, may take %lld", ll(needed)),
                   strf("ulimit -n %lld", ll(needed)));
}

Findings look_at_open_files(Patient& patient) {
    return {open_files_finding(limit_of(RLIMIT_NOFILE), patient.comm.world().ranks)};
}
