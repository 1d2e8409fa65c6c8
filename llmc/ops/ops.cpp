// Dispatches every operation to the device. Tests replace this file with tests/support/deferred_stream.cpp.
#include "llmc/ops/op_timer.h"

#define OP(name, Args)                                                   \
    void ops::name(Ctx& ctx, const Args& args) {                         \
        if (ctx.rehearsal) return rehearse_op(ctx, OpKind::name, args);  \
        const OpSpan span(ctx, OpKind::name, args);                      \
        device::name(ctx, args);                                         \
    }
#include "llmc/ops/ops.inl"
#undef OP
