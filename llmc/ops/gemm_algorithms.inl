// Matmul plans, declared once and included inside `namespace cpu` and `namespace cuda`. No include guard.
// A plan is the algorithm chosen for one shape. A resumed run imports the plans of its checkpoint, so that it uses the
// same algorithms and computes the same bits. The CPU has one algorithm and no plans.

// With search, the first gemm of a shape without a plan measures the library's algorithms, and for blockwise E4M3 the
// custom kernel too; without, it takes the library's first suggestion. The search uses the operands of that call and
// leaves D as a single call would.
void gemm_set_search(Ctx& ctx, bool search);
// What searches have taken since the device was opened.
double gemm_search_seconds(const Ctx& ctx);
// Returns all plans as JSON text: {"library": ..., "gpu": ..., "plans": [{key fields, algorithm words, us}...]}.
std::string gemm_export_plans(Ctx& ctx);
// Imports plans. Returns "", or the reason why bits may differ (another library version or GPU; the plans are then
// dropped). Malformed text: exit 2.
std::string gemm_import_plans(Ctx& ctx, const std::string& json);

// Number of matmuls with two FP8 or two INT8 operands that were executed since the device was opened, without those of
// searches. A run compares it with its plan to prove that FP8 was used.
int64_t fp8_matmuls(const Ctx& ctx);
