// The CPU device: host memory, everything done when a call returns, except what a late stream is given.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "llmc/base/check.h"
#include "llmc/ops/deferred_stream.h"
#include "llmc/ops/device.h"
#include "llmc/ops/op_timer.h"

// In the order of the calls; done by the thread that made them, when it waits.
struct LateWork {
    std::deque<std::function<void()>> given;
    bool running = false;   // what the first of them calls is part of it
    std::shared_ptr<LateWork> self;   // until it is closed; points in it may live longer
};

namespace cpu {

namespace {
// A place in a stream.
struct Point {
    std::shared_ptr<LateWork> late;
    bool reached = true;
    std::chrono::steady_clock::time_point when = {};
};

// struct Event is opaque and differs from device to device, so this one lives behind a cast.
struct CpuEvent {
    std::shared_ptr<Point> point = std::make_shared<Point>();
};
CpuEvent* of(Event* event) { return reinterpret_cast<CpuEvent*>(event); }

void run_next(LateWork& late) {
    CHECK(!late.running, "a stream waits for what it was given later");
    const std::function<void()> work = std::move(late.given.front());
    late.given.pop_front();
    const struct Running {
        bool& flag;
        ~Running() { flag = false; }
    } running{late.running = true};
    work();
}

// By value: on the way the event may be recorded anew.
void run_up_to(const std::shared_ptr<Point> point) {
    while (!point->reached && !point->late->given.empty()) run_next(*point->late);
}

template <typename Work> void in_order(Ctx& ctx, Work&& work) {
    if (ctx.late) put_off(ctx, std::forward<Work>(work));
    else work();
}

LateWork* open_late() {
    const auto late = std::make_shared<LateWork>();
    late->self = late;
    return late.get();
}

// Destructors call this. After an error nobody needs the rest, and other ranks may not come to its collectives.
void close_late(Ctx& ctx) {
    try {
        if (std::uncaught_exceptions() == 0) synchronize(ctx);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "warning: closing a stream: %s\n", error.what());
    }
    if (ctx.late) {
        ctx.late->given.clear();
        const std::shared_ptr<LateWork> last = std::move(ctx.late->self);
    }
    ctx = Ctx{};
}

// A line "MemAvailable:   123 kB" of /proc/meminfo, in bytes; -1 if it cannot be read.
int64_t meminfo_bytes(const std::string& key) {
    std::ifstream file("/proc/meminfo");
    std::string name, unit;
    int64_t value;
    while (file >> name >> value) {
        if (name == key + ":") return value * 1024;
        std::getline(file, unit);
    }
    return -1;
}

std::atomic<int64_t>& allocations() {
    static std::atomic<int64_t> count{0};
    return count;
}

void* allocate(int64_t bytes, const char* what) {
    constexpr size_t kAlignment = 256;
    CHECK(bytes >= 0, "%s of %lld bytes", what, (long long)bytes);
    int64_t available = device_free_bytes();
    // Linux grants more than it has and kills the process later: a refusal now is the better message.
    void* memory = nullptr;
    if (available < 0 || bytes <= available) {
        size_t padded = (static_cast<size_t>(bytes) + kAlignment) / kAlignment * kAlignment;
        memory = std::aligned_alloc(kAlignment, padded);
    }
    REQUIRE(memory, "out of memory: %lld bytes asked for, %lld free; lower --micro-batch-size or the model's "
            "size", (long long)bytes, (long long)available);
    allocations()++;
    return memory;
}
}  // namespace

int device_count() { return 1; }

DeviceInfo device_info(int index) {
    CHECK(index == 0 || index == -1, "CPU device %d", index);
    DeviceInfo info;
    info.index = 0;
    info.name = "CPU";
    info.sm_count = static_cast<int>(std::thread::hardware_concurrency());
    info.memory_bytes = std::max<int64_t>(0, meminfo_bytes("MemTotal"));
    info.matmul_library = "cpu";
    return info;
}

void device_open(Ctx& ctx, int index) {
    REQUIRE(index == 0, "CPU device %d does not exist: the CPU is device 0", index);
    ctx = Ctx{};
    ctx.sm_count = static_cast<int>(std::thread::hardware_concurrency());
}
void device_close(Ctx& ctx) { close_late(ctx); }
void device_use(const Ctx&) {}
void side_open(Ctx& side, const Ctx& ctx) {
    side = ctx;
    side.recorder = nullptr;
    side.late = ctx.late || ctx.rehearsal ? nullptr : open_late();
}
void side_close(Ctx& side) { close_late(side); }

void run_late(Ctx& ctx) {
    if (!ctx.late) ctx.late = open_late();
}
void put_off(Ctx& ctx, std::function<void()> work) {
    if (ctx.late->running) work();
    else ctx.late->given.push_back(std::move(work));
}

void* device_alloc(int64_t bytes) { return allocate(bytes, "device_alloc"); }
void device_free(void* memory) { std::free(memory); }
void* pinned_alloc(int64_t bytes) { return allocate(bytes, "pinned_alloc"); }
void pinned_free(void* memory) { std::free(memory); }
int64_t allocation_count() { return allocations(); }
int64_t device_free_bytes() { return meminfo_bytes("MemAvailable"); }

void copy_to_device(Ctx& ctx, void* device, const void* host, int64_t bytes) {
    copy_on_device(ctx, device, host, bytes);
}
void copy_to_host(Ctx& ctx, void* host, const void* device, int64_t bytes) {
    copy_on_device(ctx, host, device, bytes);
}
void copy_on_device(Ctx& ctx, void* to, const void* from, int64_t bytes) {
    CHECK(bytes >= 0, "copy of %lld bytes", (long long)bytes);
    if (ctx.rehearsal || bytes == 0) return;
    const OpSpan span(ctx, "copy", 2 * bytes);
    in_order(ctx, [=] { std::memcpy(to, from, static_cast<size_t>(bytes)); });
}
void fill_bytes(Ctx& ctx, void* device, int value, int64_t bytes) {
    CHECK(bytes >= 0, "fill of %lld bytes", (long long)bytes);
    if (ctx.rehearsal || bytes == 0) return;
    const OpSpan span(ctx, "fill", bytes);
    in_order(ctx, [=] { std::memset(device, value, static_cast<size_t>(bytes)); });
}
void synchronize(Ctx& ctx) {
    while (ctx.late && !ctx.late->running && !ctx.late->given.empty()) run_next(*ctx.late);
}

Event* event_create() { return reinterpret_cast<Event*>(new CpuEvent); }
void event_destroy(Event* event) { delete of(event); }
void event_record(Ctx& ctx, Event* event) {
    if (ctx.rehearsal) return;
    const auto point = std::make_shared<Point>(Point{.late = ctx.late ? ctx.late->self : nullptr, .reached = false});
    of(event)->point = point;
    in_order(ctx, [point] {
        point->when = std::chrono::steady_clock::now();
        point->reached = true;
    });
}
void event_wait(Event* event) { run_up_to(of(event)->point); }
void event_order(Ctx& ctx, Event* event) {
    if (ctx.orders && (*ctx.orders)-- == 0) return;
    if (of(event)->point->late.get() != ctx.late) run_up_to(of(event)->point);
}
bool event_reached(Event* event) { return of(event)->point->reached; }
float event_elapsed_ms(Event* begin, Event* end) {
    return std::chrono::duration<float, std::milli>(of(end)->point->when - of(begin)->point->when).count();
}

void range_push(const char*) {}
void range_pop() {}
void profiler_start() {}
void profiler_stop() {}

void gemm_set_search(Ctx&, bool) {}

int64_t fp8_matmuls(const Ctx& ctx) { return ctx.fp8_matmuls; }

std::string gemm_export_plans(Ctx&) { return R"({"library":"cpu","plans":[]})"; }

std::string gemm_import_plans(Ctx&, const std::string& json) {
    nlohmann::json plans = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
    bool sound = plans.is_object() && plans.contains("library") && plans["library"].is_string()
                 && plans.contains("plans") && plans["plans"].is_array();
    REQUIRE(sound, "matmul plans are not of the form {\"library\": text, \"plans\": [...]}: \"%.60s\"",
            json.c_str());
    const std::string library = plans["library"].get<std::string>();
    if (library == "cpu") return "";
    return strf("the matmul plans were made by %s and this run uses the CPU's own matmul", library.c_str());
}

}  // namespace cpu
