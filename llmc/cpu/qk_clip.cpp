// QK-clip. CPU.
#include "llmc/cpu/cast_lines.h"
#include "llmc/cpu/common.h"
#include "llmc/ops/adam_math.h"

namespace cpu {

void qk_clip_factors(Ctx&, const QkClipFactorsArgs& args) {
    const int64_t layers = args.max_logits.elems / args.NH, heads = args.NH + args.NKV;
    check_tensor("qk_clip_factors", "factors", args.factors, Dtype::kFp32, layers * heads);
    const float* logits = args.max_logits.as<float>();
    StepState& state = *args.state;
    state.max_logit = 0, state.clipped_heads = 0;
    for (int64_t i = 0; i < args.max_logits.elems; i++) {
        state.max_logit = std::max(state.max_logit, logits[i]);
        state.clipped_heads += !state.skip && logits[i] > args.tau;
    }
    for (int64_t i = 0; i < args.factors.elems; i++)
        args.factors.as<float>()[i] =
            qk_clip_factor(logits + i / heads * args.NH, args.NH, args.NKV, i % heads, args.tau);
}

void qk_clip(Ctx&, const QkClipArgs& args) {
    if (args.state->skip) return;
    const bool fp64 = args.master.dtype == Dtype::kFp64;
    for_working_type("qk_clip", args.param ? args.param.dtype : fp64 ? Dtype::kFp64 : Dtype::kBf16,
                     [&]<typename T>(Tag<T>) {
        using A = Acc<T>;
        check_tensor("qk_clip", "master", args.master, stat_dtype<T>, args.master.elems);
        A* master = args.master.as<A>();
        for_chunks(args.master.elems, [&](int64_t begin, int64_t count) {
            uint32_t amax = 0;
            for (int64_t i = begin; i < begin + count; i++) {
                const int64_t head = (args.begin + i) / args.head_elems;
                if (head < args.factors.elems) master[i] *= static_cast<A>(args.factors.as<float>()[head]);
                if (args.param) args.param.as<T>()[i] = T(master[i]);
                amax = std::max(amax, amax_bits_of(static_cast<float>(bf16(static_cast<float>(master[i])))));
            }
            if (args.entry) raise_amax(&args.entry->amax_bits, amax);
        });
    });
}

}  // namespace cpu
