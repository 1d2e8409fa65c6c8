// Operations on a late stream, with arguments of their own. They are timed when they are done.
#include "llmc/ops/deferred_stream.h"
#include "llmc/ops/ops.h"

#define OP(name, Args)                              \
    void late::name(Ctx& ctx, const Args& args) {   \
        cpu::put_off(ctx, [&ctx, args] {            \
            if (ctx.timer) timed::name(ctx, args);  \
            else cpu::name(ctx, args);              \
        });                                         \
    }
#include "llmc/ops/ops.inl"
#undef OP
