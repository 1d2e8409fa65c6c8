// Device functions, declared once and included inside `namespace cpu` and `namespace cuda` (see device.h).
// No include guard on purpose.

// Number of usable devices: 1 on the CPU; 0 in a CUDA build on a machine without a driver or GPU (never an error).
int device_count();
// Describes one device. Index -1 needs no GPU and yields names and library versions only.
DeviceInfo device_info(int index);

// Opens device `index`: stream, matmul handle, workspace. Exit 2 with the reason if it cannot be used.
void device_open(Ctx& ctx, int index);
void device_close(Ctx& ctx);
void device_use(const Ctx& ctx);   // must be called first in every other thread that uses the device

// Memory, 256-byte aligned. A failed allocation reports how many bytes were asked for and how many are free (exit 2).
// allocation_count() counts all allocations since start, so that the training loop can check that the steps after the
// first one allocate nothing.
void* device_alloc(int64_t bytes);
void device_free(void* memory);
void* pinned_alloc(int64_t bytes);  // host memory that the device can copy from asynchronously
void pinned_free(void* memory);
int64_t allocation_count();
int64_t device_free_bytes();

// Run on ctx.stream, asynchronously where the device allows it; no-ops during a rehearsal.
void copy_to_device(Ctx& ctx, void* device, const void* host, int64_t bytes);
void copy_to_host(Ctx& ctx, void* host, const void* device, int64_t bytes);
void copy_on_device(Ctx& ctx, void* to, const void* from, int64_t bytes);
void fill_bytes(Ctx& ctx, void* device, int value, int64_t bytes);
void synchronize(Ctx& ctx);

// Events mark a point of a stream. event_wait blocks the host until the point is reached.
Event* event_create();
void event_destroy(Event* event);
void event_record(Ctx& ctx, Event* event);
void event_wait(Event* event);
bool event_reached(Event* event);
float event_elapsed_ms(Event* begin, Event* end);  // both must have been reached

// Opens a second stream, of higher priority, on the device of `ctx`; it cannot run matmuls. Only events order the two.
// Close it before ctx.
void side_open(Ctx& side, const Ctx& ctx);
void side_close(Ctx& side);
// Makes later work on ctx.stream wait for an event of any stream (cudaStreamWaitEvent); the host does not wait.
void event_order(Ctx& ctx, Event* event);

// Names the attention kernel that an open device uses for a working type and head dim, for the banner. softcap: whether
// scores have a soft cap.
const char* attention_kernel(const Ctx& ctx, Dtype dtype, int64_t head_size, bool softcap = false);
// Names how it runs grouped_gemm of operands of that type, likewise.
const char* experts_kernel(const Ctx& ctx, Dtype dtype);
// Elements of fp32 scratch that attention_backward needs (AttentionBackwardArgs::sums); needs no open device.
int64_t attention_sums_elems(Dtype dtype, int64_t B, int64_t T, int64_t NH, int64_t head_size);

// Named ranges for a profiler (NVTX) and its capture window. No-ops on the CPU.
void range_push(const char* name);
void range_pop();
void profiler_start();
void profiler_stop();
