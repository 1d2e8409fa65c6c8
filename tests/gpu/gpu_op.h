// Runs one operation on both devices. The error of the GPU is measured against the CPU's result in double, and bounded
// by the error of the CPU's result in the same types as the GPU's.
#pragma once
#include <cstdlib>
#include <map>

#include "tests/gpu/gpu_tensor.h"
#include "tests/support/files_test.h"

namespace op_test {

using files_test::error_of;

// The type of a tensor of a case: that of activations, of statistics, of scratch (which is not compared), of
// gradients, or a fixed type (tokens, fp64 sums, StepState).
enum class Kind { kWork, kStat, kScratch, kGrad, kFixed };

// GPU_TEST_SMALL=1 leaves out large cases, for compute-sanitizer, which is a hundred times slower.
inline bool left_out(int64_t elems) {
    static const bool small = std::getenv("GPU_TEST_SMALL") != nullptr;
    return small && elems > 20000;
}

class OpCase {
public:
    // shift_bytes misaligns every fp32 and bf16 device tensor, so that the scalar paths run.
    OpCase(std::string name, Dtype work, Dtype grad = Dtype::kFp32, int64_t shift_bytes = 0)
        : name_(std::move(name) + strf(" %s, gradients %s%s", dtype_name(work), dtype_name(grad),
                                       shift_bytes ? ", shifted" : "")),
          work_(work),
          grad_(grad),
          shift_bytes_(shift_bytes) {}

    const std::string& name() const { return name_; }
    // Sets the values of a tensor before the operation.
    void add(const std::string& tensor, Kind kind, HostTensor start) {
        slots_[tensor] = Slot{kind, std::move(start), {}, {}, {}};
    }
    void random(const std::string& tensor, Kind kind, int64_t elems, double mul = 1, double mean = 0) {
        add(tensor, kind, random_tensor(type_of(kind), elems, rng_key(7, tensor), mul, mean));
    }
    // An output, which is NaN before the operation.
    void poison(const std::string& tensor, Kind kind, int64_t elems) {
        add(tensor, kind, HostTensor(type_of(kind), elems));
    }

    // Runs the operation twice on the GPU, which must give equal bits, and on the CPU in the case's types and in fp64.
    // make(view) builds the arguments; view(name) is empty for a tensor that the case does not have.
    template <typename Args, typename Make>
    void run(void (*on_gpu)(Ctx&, const Args&), void (*on_cpu)(Ctx&, const Args&), Make make) {
        run_same_types(on_gpu, on_cpu, make);
        for (auto& [tensor, slot] : slots_) {
            if (slot.kind == Kind::kFixed) slot.exact = slot.start;
            else if (slot.kind == Kind::kScratch) slot.exact = HostTensor(Dtype::kFp64, slot.start.elems());
            else slot.exact = slot.start.to(Dtype::kFp64);
        }
        Ctx ctx;
        on_cpu(ctx, make([&](const std::string& tensor) { return view(tensor, &Slot::exact); }));
    }
    // The same without the run in fp64; only check_bits may follow.
    template <typename Args, typename Make>
    void run_same_types(void (*on_gpu)(Ctx&, const Args&), void (*on_cpu)(Ctx&, const Args&), Make make) {
        INFO(name_);
        for (int repeat = 0; repeat < 2; repeat++) {
            std::map<std::string, DeviceTensor> device;
            for (auto& [tensor, slot] : slots_) {
                const bool floats = slot.start.dtype() == Dtype::kFp32 || slot.start.dtype() == Dtype::kBf16;
                device.try_emplace(tensor, slot.start, floats ? shift_bytes_ : 0);
            }
            on_gpu(gpu(), make([&](const std::string& tensor) {
                auto found = device.find(tensor);
                return found == device.end() ? Tensor{} : found->second.view();
            }));
            cuda::synchronize(gpu());
            for (auto& [tensor, slot] : slots_) {
                HostTensor result = device.at(tensor).download();
                INFO("second run, " << tensor);
                if (repeat == 1) CHECK(result.same_bits(slot.gpu));
                slot.gpu = std::move(result);
            }
        }
        for (auto& [tensor, slot] : slots_) slot.cpu = slot.start;
        Ctx ctx;
        on_cpu(ctx, make([&](const std::string& tensor) { return view(tensor, &Slot::cpu); }));
    }

    // The error against fp64 may be twice the CPU's plus one rounding of the largest element, for the worst element
    // and for the root mean square. Four roundings are allowed if there are so few elements that the CPU's error may
    // be small by chance. slack: what the kernel's method adds to the error of any element.
    void check(const std::string& tensor, double slack = 0) const {
        const Slot& slot = slots_.at(tensor);
        double largest = 0, worst = 0;
        for (int64_t i = 0; i < slot.exact.elems(); i++) {
            largest = std::max(largest, std::fabs(slot.exact.get(i)));
            worst = std::max(worst, std::fabs(slot.cpu.get(i) - slot.exact.get(i)));
        }
        const double round = (slot.exact.elems() < 16 ? 4 : 1) * unit_roundoff(slot.gpu.dtype()) * largest;
        const double bound = 2 * worst + round + slack + kTiny;
        INFO(name_ << ": " << tensor);
        if (largest == 0) {   // all exact values are 0, and so must be the result, but for the slack
            CHECK_EQ(first_difference(slot.gpu, slot.exact, [&](int64_t) { return slack; }), "");
            return;
        }
        check_close(name_ + ": " + tensor, slot.gpu, slot.exact, [&](int64_t) { return bound; });
        CHECK_LE(rms_error(slot.gpu, slot.exact), 2 * rms_error(slot.cpu, slot.exact) + round + slack + kTiny);
    }
    // The result must equal the CPU's in the same types to the bit. any_nan: NaN may have any sign and payload, since
    // those that arithmetic yields differ between processors.
    void check_bits(const std::string& tensor, bool any_nan = false) const {
        HostTensor on_gpu = slots_.at(tensor).gpu, on_cpu = slots_.at(tensor).cpu;
        for (HostTensor* t : {&on_gpu, &on_cpu})
            for (int64_t i = 0; any_nan && dtype_bytes(t->dtype()) > 1 && i < t->elems(); i++)
                if (std::isnan(t->get(i))) t->set(i, std::nan(""));
        INFO(name_ << ": " << tensor << ": " << first_difference(on_gpu, on_cpu));
        CHECK(on_gpu.same_bits(on_cpu));
    }
    void check_unchanged(const std::string& tensor) const {
        const Slot& slot = slots_.at(tensor);
        INFO(name_ << ": " << tensor);
        CHECK(slot.gpu.same_bits(slot.start));
    }
    const HostTensor& on_gpu(const std::string& tensor) const { return slots_.at(tensor).gpu; }
    const HostTensor& on_cpu(const std::string& tensor) const { return slots_.at(tensor).cpu; }

private:
    struct Slot {
        Kind kind = Kind::kFixed;
        HostTensor start, gpu, cpu, exact;
    };
    Dtype type_of(Kind kind) const {
        return kind == Kind::kWork ? work_ : kind == Kind::kGrad ? grad_ : Dtype::kFp32;
    }
    Tensor view(const std::string& tensor, HostTensor Slot::*world) {
        auto found = slots_.find(tensor);
        return found == slots_.end() ? Tensor{} : (found->second.*world).view();
    }

    std::string name_;
    Dtype work_, grad_;
    int64_t shift_bytes_;
    std::map<std::string, Slot> slots_;
};

// Every pair of working type and gradient type, and one misaligned case.
inline void for_gpu_types(const std::function<void(Dtype work, Dtype grad, int64_t shift_bytes)>& f) {
    f(Dtype::kFp32, Dtype::kFp32, 0);
    f(Dtype::kBf16, Dtype::kFp32, 0);
    f(Dtype::kBf16, Dtype::kBf16, 0);
    f(Dtype::kFp32, Dtype::kFp32, 4);
    f(Dtype::kBf16, Dtype::kFp32, 4);
}

}  // namespace op_test
