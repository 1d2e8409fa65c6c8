// Items of `doctor` about distributed runs: the libraries that connect ranks, and the results of collectives.
#include <algorithm>

#include "llmc/base/check.h"
#include "llmc/base/system/host.h"
#include "llmc/base/text.h"
#include "llmc/commands/doctor/doctor_items.h"
#include "llmc/ops/owned.h"
#include "llmc/parallel/comm/comm_benchmark.h"
#include "llmc/parallel/comm/comm_mpi.h"
#include "llmc/parallel/comm/comm_nccl_api.h"
#include "llmc/parallel/rank_preflight.h"

namespace {

constexpr int kConnectSeconds = 120;
constexpr const char* kStartRanks = "mpirun -np N checks them, as scripts/launch/launch_mpi.sh does";

// fp32 values in device memory: whole numbers whose sums over up to 2000 ranks are exact in any order.
class RankValues {
public:
    RankValues(Ctx& ctx, int64_t elems)
        : ctx_(ctx), host_(static_cast<size_t>(elems)), memory_(device::device_alloc(bytes())) {}

    int64_t elems() const { return static_cast<int64_t>(host_.size()); }
    int64_t bytes() const { return elems() * 4; }
    Tensor view() const { return {memory_.get(), Dtype::kFp32, elems()}; }
    static float value(int rank, int64_t i) { return static_cast<float>((i % 1009 + 1) * (rank % 8 + 1)); }
    void fill(int rank) {
        for (int64_t i = 0; i < elems(); i++) host_[static_cast<size_t>(i)] = value(rank, i);
        upload();
    }
    void add_to(int64_t i, float what) {
        read();
        host_[static_cast<size_t>(i)] += what;
        upload();
    }
    const std::vector<float>& read() {
        device::copy_to_host(ctx_, host_.data(), memory_.get(), bytes());
        device::synchronize(ctx_);
        return host_;
    }

private:
    void upload() {
        device::copy_to_device(ctx_, memory_.get(), host_.data(), bytes());
        device::synchronize(ctx_);
    }
    Ctx& ctx_;
    std::vector<float> host_;
    const DevicePtr<> memory_;
};

// Returns the first element i of [begin, end) that is not want(i), as text; "" if all are right.
template <typename Want> std::string wrong_element(const char* call, RankValues& values, int64_t begin, int64_t end,
                                                   Want want) {
    const std::vector<float>& got = values.read();
    for (int64_t i = begin; i < end; i++)
        if (got[static_cast<size_t>(i)] != want(i))
            return strf("%s: element %lld is %.9g, and the sum on the host %.9g", call, ll(i),
                        static_cast<double>(got[static_cast<size_t>(i)]), static_cast<double>(want(i)));
    return "";
}

// Checks all-reduce, reduce-scatter, all-gather and all-to-all of `block` elements per rank. Every rank makes all
// calls, also after an error.
std::string collectives_error(Patient& patient, int64_t block, bool corrupt) {
    Comm& comm = patient.comm;
    Ctx& ctx = patient.ctx;
    const int rank = comm.world().rank, ranks = comm.world().ranks;
    const int64_t own = rank * block, elems = ranks * block;
    auto total = [&](int64_t i) {
        float sum = 0;
        for (int r = 0; r < ranks; r++) sum += RankValues::value(r, i);
        return sum;
    };
    std::vector<std::string> wrong;
    RankValues a(ctx, elems), b(ctx, elems);
    a.fill(rank);
    comm.sum(ctx, a.view());
    if (corrupt && rank == ranks - 1) a.add_to(elems / 2, 1);
    wrong.push_back(wrong_element("all-reduce", a, 0, elems, total));
    a.fill(rank);
    comm.reduce_scatter(ctx, a.view());
    wrong.push_back(wrong_element("reduce-scatter", a, own, own + block, total));
    a.fill(rank);
    comm.all_gather(ctx, a.view());
    wrong.push_back(wrong_element("all-gather", a, 0, elems, [&](int64_t i) {
        return RankValues::value(static_cast<int>(i / block), i);
    }));
    a.fill(rank);
    comm.all_to_all(ctx, b.view(), a.view());
    wrong.push_back(wrong_element("all-to-all", b, 0, elems, [&](int64_t i) {
        return RankValues::value(static_cast<int>(i / block), own + i % block);
    }));
    const auto first = std::find_if(wrong.begin(), wrong.end(), [](const std::string& w) { return !w.empty(); });
    return first == wrong.end() ? "" : *first;
}

bool connect_devices(Patient& patient, std::string& line) {
    if (!patient.opened) return false;
    std::string error;
    if (patient.cuda_build) {
        nccl_api::Loaded loaded;
        error = nccl_api::load(nccl_api::kLibrary, loaded);
    }
    const bool all = patient.comm.sum(std::vector<int64_t>{error.empty()})[0] == patient.comm.world().ranks;
    if (!all) return false;
    line = patient.comm.connect(patient.ctx, kConnectSeconds);   // ends all ranks by itself if they do not meet
    patient.connected = true;
    return true;
}

}  // namespace

Findings look_at_mpi(Patient& patient) {
    const std::string library = mpi_library_text();
    if (library.empty())
        return {not_checked("built without OpenMPI: one rank only", "install libopenmpi-dev, run make again")};
    if (library.find("Open MPI") == std::string::npos)
        return {warning(library + ": signals and exit codes are tested with OpenMPI's mpirun only",
                        "build with OpenMPI")};
    const int ranks = patient.comm.world().ranks;
    return {ok(library + strf(": enables distributed runs, by mpirun or srun --mpi=pmix; this is %s",
                              ranks == 1 ? "one" : strf("one of %d", ranks).c_str()))};
}

Findings look_at_nccl(Patient& patient) {
    if (!patient.cuda_build) return {not_checked("ranks on the CPU exchange over MPI", "make DEVICE=cuda")};
    nccl_api::Loaded loaded;
    const std::string error = nccl_api::load(nccl_api::kLibrary, loaded);
    if (error.empty())
        return {ok(strf("NCCL %s from %s: enables ranks on several GPUs",
                        nccl_api::version_text(loaded.version).c_str(), loaded.path.c_str()))};
    const size_t advice = error.rfind("; ");
    const std::string what = error.substr(0, advice);
    const std::string fix = advice == std::string::npos ? "" : error.substr(advice + 2);
    return {patient.comm.world().ranks > 1 ? failed(what, fix) : warning(what, fix)};
}

Findings look_at_ranks(Patient& patient) {
    const int ranks = patient.comm.world().ranks;
    if (ranks == 1) return {not_checked("one rank", kStartRanks)};
    try {
        require_same_program(patient.comm);
    } catch (const Error& e) {   // on all ranks
        return {failed(e.what(), "start the same executable on all hosts")};
    }
    std::vector<std::string> hosts = patient.comm.gather(host_name());
    std::sort(hosts.begin(), hosts.end());
    const auto different = std::unique(hosts.begin(), hosts.end()) - hosts.begin();
    return {ok(strf("%s on %s, one executable", count_text(ranks, "rank").c_str(),
                    count_text(different, "host").c_str()))};
}

Findings look_at_collectives(Patient& patient) {
    if (patient.comm.world().ranks == 1) return {not_checked("one rank", kStartRanks)};
    std::string line;
    if (!connect_devices(patient, line)) return {not_checked("the devices of ranks cannot be connected: see above")};
    const bool corrupt = patient.corrupted("collectives");
    // A small and a large size, because libraries choose the algorithm by size.
    for (const int64_t block : {int64_t{1003}, int64_t{1} << 20}) {
        const std::string wrong = collectives_error(patient, block, corrupt);
        const bool any = patient.comm.sum(std::vector<int64_t>{!wrong.empty()})[0] > 0;
        if (!wrong.empty())
            return {failed(wrong, "do not train here; NCCL_DEBUG=INFO shows the transport, and "
                                  "NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 selects another one")};
        if (any) return {ok("as expected on this rank")};
    }
    return {ok("all-reduce, reduce-scatter, all-gather, all-to-all of 4 KiB and 4 MiB a rank equal the host's sums"
               + (line.empty() ? "" : "; " + line))};
}

// On the CPU the ranks of a host communicate through memory, so a low rate does not indicate a bad link.
Findings look_at_links(Patient& patient) {
    if (patient.comm.world().ranks == 1) return {not_checked("one rank", kStartRanks)};
    if (!patient.connected) return {not_checked("the ranks' devices are not connected")};
    const std::string prefix = "check-comm: ", warns = "WARNING: ";
    Findings findings;
    for (std::string line : check_comm(patient.ctx, patient.comm, false)) {
        if (line.rfind(prefix, 0) == 0) line = line.substr(prefix.size());
        if (line.rfind(warns, 0) != 0) findings.push_back(ok(line));
        else if (patient.gpu())
            findings.push_back(warning(line.substr(warns.size()), "nvidia-smi topo -m; ibstat between hosts"));
    }
    return findings;
}
