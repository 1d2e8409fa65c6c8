// Operations on a late stream, with arguments of their own.
#include "llmc/late_work.h"
#include "llmc/ops.h"

#define OP(name, Args)                                             \
    void late::name(Ctx& ctx, const Args& args) {                  \
        cpu::put_off(ctx, [&ctx, args] { cpu::name(ctx, args); }); \
    }
#include "llmc/ops.inl"
#undef OP
