// Rotary position embedding in place. CPU.
#include "llmc/cpu/quantize.h"

namespace cpu {
namespace {

// direction: 1 for the forward pass, -1 for the backward pass.
template <typename T> void rotate(const RopeArgs& args, Acc<T> direction) {
    using A = Acc<T>;
    const int64_t half = args.R() / 2, heads = args.NH + args.NKV, width = (heads + args.NKV) * args.HS;
    parallel_for(args.N, args.N * heads * args.HS, [&](int64_t n) {
        const A* table = args.cos_sin.as<A>() + row_position(args.positions, n, args.T) * args.R();
        for (int64_t h = 0; h < heads; h++) {
            T* first = args.qkv.as<T>() + n * width + h * args.HS;
            T* second = first + half;
            for (int64_t i = 0; i < half; i++) {
                A cosine = table[2 * i], sine = table[2 * i + 1] * direction;
                A x = widen(first[i]), y = widen(second[i]);
                first[i] = T(x * cosine - y * sine);
                second[i] = T(y * cosine + x * sine);
            }
        }
    });
}

void run(const char* op, const RopeArgs& args, int direction) {
    CHECK(args.R() % 2 == 0 && args.R() <= args.HS, "%s: %lld elements of a head", op, ll(args.R()));
    const int64_t width = (args.NH + 2 * args.NKV) * args.HS;
    const QuantResult result(op, args.quant, args.qkv, args.qkv.dtype, args.N, width);
    for_working_type(op, args.qkv.dtype, [&]<typename T>(Tag<T>) {
        check_tensor(op, "qkv", args.qkv, dtype_of<T>, args.N * width);
        check_at_least(op, "cos_sin", args.cos_sin, stat_dtype<T>,
                       positions_of(args.positions, args.N, args.T) * args.R());
        rotate<T>(args, Acc<T>(direction));
    });
    result.quantize();
    result.corrupt();
}

}  // namespace

void rope_forward(Ctx&, const RopeArgs& args) { run("rope_forward", args, 1); }
void rope_backward(Ctx&, const RopeArgs& args) { run("rope_backward", args, -1); }

}  // namespace cpu
