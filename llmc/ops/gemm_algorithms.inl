// Matmul plans, declared once and included inside `namespace cpu` and `namespace cuda`. No include guard.
// A plan is the algorithm chosen for one shape; plans make resumed runs pick the same algorithm, hence the
// same bits. The CPU has one algorithm and an empty plan.

// Measure algorithms for shapes not planned yet (the first gemm of a shape searches), the library's and our own kernel
// for blockwise E4M3, or take the library's first answer. Searching uses the operands of that call and leaves D as one
// plain call would.
void gemm_set_search(Ctx& ctx, bool search);
// All plans as JSON text: {"library": ..., "gpu": ..., "plans": [{key fields, algorithm words, us}...]}.
std::string gemm_export_plans(Ctx& ctx);
// Take over plans. Returns "" or the reason why bits may differ (another library version or GPU; the plans
// are then dropped). Malformed text: exit 2.
std::string gemm_import_plans(Ctx& ctx, const std::string& json);

// Matmuls executed since the device was opened whose operands, as passed to the library or to a kernel of our own, were
// both FP8; searches do not count. What the run compares with its plan to prove that FP8 ran.
int64_t fp8_matmuls(const Ctx& ctx);
