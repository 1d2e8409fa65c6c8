// INT8 matrices with a scale per row, and their transposes in FP8.
#include "llmc/cuda/fp8.cuh"

namespace cuda {

void quantize_int8(Ctx&, const QuantizeInt8Args&) { FAIL(kExitBug, "quantize_int8 has no kernel yet"); }
void row_amax(Ctx&, const RowAmaxArgs&) { FAIL(kExitBug, "row_amax has no kernel yet"); }
void quantize_int8_run(Ctx&, const QuantizeInt8RunArgs&) { FAIL(kExitBug, "quantize_int8_run has no kernel yet"); }
void row_scales(Ctx&, const RowScalesArgs&) { FAIL(kExitBug, "row_scales has no kernel yet"); }
void transpose_int8(Ctx&, const TransposeInt8Args&) { FAIL(kExitBug, "transpose_int8 has no kernel yet"); }

}  // namespace cuda
