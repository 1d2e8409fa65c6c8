// Device functions, declared once and included inside `namespace cpu` and `namespace cuda` (see device.h).
// No include guard on purpose.

// Usable devices: 1 on the CPU; 0 in a CUDA build on a machine without a driver or GPU (never an error).
int device_count();
// Facts about one device. Works without a GPU for index -1: names and library versions only.
DeviceInfo device_info(int index);

// Open device `index`: stream, matmul handle, workspace. Exit 2 with the reason when it cannot be used.
void device_open(Ctx& ctx, int index);
void device_close(Ctx& ctx);
void device_use(const Ctx& ctx);   // in another thread, before it calls anything else here

// Memory. Allocation failures say how many bytes were asked for and how many are free (exit 2).
// device_alloc returns 256-byte aligned memory. allocation_count() counts every call since start, so that
// the loop can assert that nothing is allocated after the first step.
void* device_alloc(int64_t bytes);
void device_free(void* memory);
void* pinned_alloc(int64_t bytes);  // host memory that the device can copy from asynchronously
void pinned_free(void* memory);
int64_t allocation_count();
int64_t device_free_bytes();  // as the driver reports it now

// Ordered on ctx.stream and asynchronous where the device allows it; skipped during a rehearsal.
void copy_to_device(Ctx& ctx, void* device, const void* host, int64_t bytes);
void copy_to_host(Ctx& ctx, void* host, const void* device, int64_t bytes);
void copy_on_device(Ctx& ctx, void* to, const void* from, int64_t bytes);
void fill_bytes(Ctx& ctx, void* device, int value, int64_t bytes);
void synchronize(Ctx& ctx);

// Events mark a point of ctx.stream. event_wait blocks the host until the point is reached.
Event* event_create();
void event_destroy(Event* event);
void event_record(Ctx& ctx, Event* event);
void event_wait(Event* event);
bool event_reached(Event* event);
float event_elapsed_ms(Event* begin, Event* end);  // both reached

// A second stream of the device of `ctx`, ahead of it where both have work; no matmuls on it. The two are ordered by
// events alone. Close it before ctx.
void side_open(Ctx& side, const Ctx& ctx);
void side_close(Ctx& side);
// What ctx.stream is given from now on waits for the point, wherever it was recorded; the host does not.
void event_order(Ctx& ctx, Event* event);

// Which attention kernel runs for a working type and head size on an open device, for the banner.
const char* attention_kernel(const Ctx& ctx, Dtype dtype, int64_t head_size);
// Whether its backward has a fast mode (AttentionBackwardArgs::fast).
bool attention_has_modes(const Ctx& ctx, Dtype dtype, int64_t head_size);
// Elements of fp32 scratch that attention_backward needs here (AttentionBackwardArgs::sums); needs no open device.
int64_t attention_sums_elems(Dtype dtype, int64_t B, int64_t T, int64_t NH, int64_t head_size);

// Named ranges for a profiler (NVTX) and its capture window. No-ops on the CPU.
void range_push(const char* name);
void range_pop();
void profiler_start();
void profiler_stop();
