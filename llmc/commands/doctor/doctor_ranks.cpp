// Checks of `doctor` about distributed runs: the libraries that connect ranks, and the results of collectives.
#include <set>

#include "llmc/base/check.h"
#include "llmc/base/system/host.h"
#include "llmc/base/text.h"
#include "llmc/commands/doctor/doctor.h"
#include "llmc/ops/owned.h"
#include "llmc/parallel/comm/comm_benchmark.h"
#include "llmc/parallel/comm/comm_nccl_api.h"
#include "llmc/parallel/rank_preflight.h"

namespace {

using enum Status;

const CheckResult kOneRank = {kNotChecked, "one rank",
                              "mpirun -np N checks them, as scripts/launch/launch_mpi.sh does"};

// Element i of a rank: whole numbers whose sums over up to 2000 ranks are exact in any order.
float value(int64_t rank, int64_t i) { return static_cast<float>((i % 1009 + 1) * (rank % 8 + 1)); }

// Checks all-reduce, reduce-scatter, all-gather and all-to-all of `block` fp32 elements per rank. Every rank makes all
// calls, also after an error. Returns the first wrong element, as text.
std::string collectives_error(Ctx& ctx, Comm& comm, int64_t block) {
    const int64_t rank = comm.world().rank, ranks = comm.world().ranks, own = rank * block, elems = ranks * block;
    const DevicePtr<> memory(device::device_alloc(elems * 4)), received(device::device_alloc(elems * 4));
    const Tensor values{memory.get(), Dtype::kFp32, elems}, other{received.get(), Dtype::kFp32, elems};
    std::vector<float> host(static_cast<size_t>(elems));
    const auto fill = [&] {
        for (int64_t i = 0; i < elems; i++) host[static_cast<size_t>(i)] = value(rank, i);
        device::copy_to_device(ctx, values.data, host.data(), values.bytes());
        device::synchronize(ctx);
    };
    std::string error;
    const auto check = [&](const char* call, const Tensor& result, int64_t begin, int64_t end, auto want) {
        device::copy_to_host(ctx, host.data(), result.data, result.bytes());
        device::synchronize(ctx);
        for (int64_t i = begin; i < end && error.empty(); i++)
            if (const float got = host[static_cast<size_t>(i)]; got != want(i))
                error = strf("%s: element %lld is %.9g, and the sum on the host %.9g", call, ll(i),
                             static_cast<double>(got), static_cast<double>(want(i)));
        fill();
    };
    const auto sum = [&](int64_t i) {
        float total = 0;
        for (int64_t r = 0; r < ranks; r++) total += value(r, i);
        return total;
    };
    fill();
    comm.sum(ctx, values);
    check("all-reduce", values, 0, elems, sum);
    comm.reduce_scatter(ctx, values);
    check("reduce-scatter", values, own, own + block, sum);
    comm.all_gather(ctx, values);
    check("all-gather", values, 0, elems, [&](int64_t i) { return value(i / block, i); });
    comm.all_to_all(ctx, other, values);
    check("all-to-all", other, 0, elems, [&](int64_t i) { return value(i / block, own + i % block); });
    return error;
}

}  // namespace

CheckResults Doctor::check_nccl() {
    if (!cuda_build_) return {{kNotChecked, "ranks on the CPU exchange over MPI", "make DEVICE=cuda"}};
    nccl_api::Loaded loaded;
    const std::string error = nccl_api::load(nccl_api::kLibrary, loaded);
    if (error.empty())
        return {{kOk, strf("NCCL %s from %s: enables ranks on several GPUs",
                           nccl_api::version_text(loaded.version).c_str(), loaded.path.c_str())}};
    const size_t advice = error.rfind("; ");
    return {{comm_.world().ranks > 1 ? kFailed : kWarning, error.substr(0, advice),
             advice == std::string::npos ? "" : error.substr(advice + 2)}};
}

CheckResults Doctor::check_ranks() {
    const int ranks = comm_.world().ranks;
    if (ranks == 1) return {kOneRank};
    try {
        require_same_program(comm_);
    } catch (const Error& e) {   // on all ranks
        return {{kFailed, e.what(), "start the same executable on all hosts"}};
    }
    const std::vector<std::string> hosts = comm_.gather(host_name());
    const auto different = static_cast<int64_t>(std::set<std::string>(hosts.begin(), hosts.end()).size());
    return {{kOk, count_text(ranks, "rank") + " on " + count_text(different, "host") + ", one executable"}};
}

CheckResults Doctor::check_collectives() {
    if (comm_.world().ranks == 1) return {kOneRank};
    nccl_api::Loaded loaded;
    const bool mine = opened_ && (!cuda_build_ || nccl_api::load(nccl_api::kLibrary, loaded).empty());
    if (comm_.sum(std::vector<int64_t>{mine})[0] < comm_.world().ranks)
        return {{kNotChecked, "the devices of ranks cannot be connected: see above"}};
    const std::string line = comm_.connect(ctx_, 120);   // ends all ranks if they do not meet in 120 s
    connected_ = true;
    // A small and a large size, because libraries choose the algorithm by size.
    std::string error = collectives_error(ctx_, comm_, 1003);
    const std::string large = collectives_error(ctx_, comm_, int64_t{1} << 20);
    if (error.empty()) error = large;
    if (!error.empty())
        return {{kFailed, error, "do not train here; NCCL_DEBUG=INFO shows the transport, and NCCL_P2P_DISABLE=1 or "
                                 "NCCL_IB_DISABLE=1 selects another one"}};
    return {{kOk, "all-reduce, reduce-scatter, all-gather, all-to-all of 4 KiB and 4 MiB a rank equal the host's sums"
                  + (line.empty() ? "" : "; " + line)}};
}

// On the CPU the ranks of a host communicate through memory, so a low rate does not indicate a bad link.
CheckResults Doctor::check_links() {
    if (comm_.world().ranks == 1) return {kOneRank};
    if (!connected_) return {{kNotChecked, "the ranks' devices are not connected"}};
    CheckResults results;
    for (std::string line : check_comm(ctx_, comm_)) {
        line = line.substr(line.find(' ') + 1);   // after "check-comm:"
        if (!line.starts_with("WARNING: ")) results.push_back({kOk, line});
        else if (gpu()) results.push_back({kWarning, line.substr(9), "nvidia-smi topo -m; ibstat between hosts"});
    }
    return results;
}
