// Work that the CPU puts off: that of a stream which is late, see device::run_late.
#pragma once
#include <functional>

#include "llmc/ops/device.h"

namespace cpu {
// Of a ctx that is late: done when something waits for it, in order. What it refers to must be there until then. What
// such work calls is part of it, and done at once.
void put_off(Ctx& ctx, std::function<void()> work);
}  // namespace cpu
