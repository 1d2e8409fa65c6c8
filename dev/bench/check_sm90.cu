// Tests single instructions of compute capability 9.0, as the attention kernels use them, against plain loops: one
// product of every operand layout, TMA boxes that exceed a tensor, and the order of work. The values are integers, so
// results must be equal; the first failure names its place. Usage: check_sm90
#include <cmath>
#include <cstdio>
#include <vector>

#include "llmc/base/fp8.h"
#include "llmc/cuda/attention_sm90.cuh"

namespace {

using namespace cuda;

constexpr uint32_t kRoom = 32 * 1024;   // of each tile

// c(64, N) = A(64, K) B(K, N). left_rows: A lies as (K, 64) in memory, else as (64, K); right_rows: B lies as (K, N),
// else as (N, K); left_registers: A goes through registers.
template <int N, bool left_rows, bool right_rows, bool left_registers>
__global__ void __launch_bounds__(128)
product_kernel(float* out, const __grid_constant__ CUtensorMap left_map, const __grid_constant__ CUtensorMap right_map,
               int K, int left_box, int right_box, int first_row) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    const uint32_t left = ptx::shared_address(memory), right = left + kRoom, barrier = right + kRoom;
    if (threadIdx.x == 0) {
        ptx::barrier_init(barrier, 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::barrier_expect(barrier, 2 * 64 * K + 2 * N * K);
        ptx::load_box(left, &left_map, barrier, first_row, 0, 0);
        ptx::load_box(right, &right_map, barrier, first_row, 0, 0);
    }
    ptx::barrier_wait(barrier, 0);
    const uint32_t left_panel = left_box * kPanelRowBytes, right_panel = right_box * kPanelRowBytes;
    const uint64_t a = tile_descriptor(left, left_panel), b = tile_descriptor(right, right_panel);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float c[N / 2] = {};
    for (int k = 0; k < K / 16; k++) {
        const uint64_t b_step = right_rows ? along_rows(b, k) : along_columns(b, k, right_panel);
        const uint64_t a_step = left_rows ? along_rows(a, k) : along_columns(a, k, left_panel);
        const uint32_t chunk = 2 * k + (lane >> 4);
        uint32_t part[4];
        ptx::load_matrix_x4(part, left + chunk / 8 * left_panel + panel_offset(16 * warp + (lane & 15), chunk % 8));
        ptx::pin(c);
        ptx::wgmma_fence();
        if constexpr (left_registers) ptx::wgmma<N, right_rows>(c, part, b_step, k > 0);
        else ptx::wgmma<N, left_rows, right_rows>(c, a_step, b_step, k > 0);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::pin(c);
    }
    for (int i = 0; i < N / 2; i++) {
        const uint32_t row = 16 * warp + 8 * (i / 2 % 2) + lane / 4, column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        out[row * N + column] = c[i];
    }
#endif
}

// c(64, N) = A(64, K) B(N, K)^T, E4M3, K the bytes of a row: head 1 of both. left_registers: A goes through registers.
template <int N, int K, bool left_registers>
__global__ void __launch_bounds__(128)
bytes_product_kernel(float* out, const uint8_t* left_head, const __grid_constant__ CUtensorMap left_map,
                     const __grid_constant__ CUtensorMap right_map, int first_row) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    const uint32_t left = ptx::shared_address(memory), right = left + kRoom, barrier = right + kRoom;
    if (threadIdx.x == 0) {
        ptx::barrier_init(barrier, 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::barrier_expect(barrier, (64 + N) * K);
        ptx::load_box(left, &left_map, barrier, first_row, 1, 0);
        ptx::load_box(right, &right_map, barrier, first_row, 1, 0);
    }
    ptx::barrier_wait(barrier, 0);
    const uint64_t a = byte_tile_descriptor<K>(left), b = byte_tile_descriptor<K>(right);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float c[N / 2] = {};
    for (int k = 0; k < K / 32; k++) {
        uint32_t part[4];
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t row = first_row + 16 * warp + lane / 4 + 8 * (i % 2), column = 32 * k + 4 * (lane % 4);
            part[i] = *reinterpret_cast<const uint32_t*>(left_head + row * K + column + 16 * (i / 2));
        }
        ptx::pin(c);
        ptx::wgmma_fence();
        if constexpr (left_registers) ptx::wgmma_e4m3<N>(c, part, along_bytes(b, k), k > 0);
        else ptx::wgmma_e4m3<N>(c, along_bytes(a, k), along_bytes(b, k), k > 0);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::pin(c);
    }
    for (int i = 0; i < N / 2; i++) {
        const uint32_t row = 16 * warp + 8 * (i / 2 % 2) + lane / 4, column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        out[row * N + column] = c[i];
    }
#endif
}

// Loads a box, and stores it unchanged to another tensor.
__global__ void __launch_bounds__(32) box_kernel(uint32_t* raw, const __grid_constant__ CUtensorMap from,
                                                 const __grid_constant__ CUtensorMap to, int bytes, int row, int panel,
                                                 int batch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    const uint32_t shared = ptx::shared_address(memory), barrier = shared + kRoom;
    if (threadIdx.x == 0) {
        ptx::barrier_init(barrier, 1);
        ptx::barrier_init_fence();
        ptx::barrier_expect(barrier, bytes);
        ptx::load_box(shared, &from, barrier, row, panel, batch);
    }
    __syncwarp();
    ptx::barrier_wait(barrier, 0);
    for (int i = threadIdx.x; i < bytes / 4; i += 32) raw[i] = reinterpret_cast<const uint32_t*>(memory)[i];
    __syncwarp();
    if (threadIdx.x == 0) {
        ptx::store_box(&to, shared, row, panel, batch);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
    }
#endif
}

struct Device {
    Ctx ctx;
    std::vector<void*> memory;
    Device() { device_open(ctx, 0); }
    template <typename T> T* upload(const std::vector<T>& host) {
        const auto bytes = static_cast<int64_t>(host.size() * sizeof(T));
        memory.push_back(device_alloc(bytes));
        copy_to_device(ctx, memory.back(), host.data(), bytes);
        synchronize(ctx);
        return static_cast<T*>(memory.back());
    }
    template <typename T> std::vector<T> download(const T* device, size_t elems) {
        std::vector<T> host(elems);
        copy_to_host(ctx, host.data(), device, static_cast<int64_t>(elems * sizeof(T)));
        synchronize(ctx);
        return host;
    }
};

std::vector<bf16> whole_numbers(size_t elems, unsigned seed) {
    std::vector<bf16> values(elems);
    unsigned state = 2654435761u * (seed + 1);
    for (bf16& v : values) state = state * 1664525u + 1013904223u, v = bf16(static_cast<float>(int(state >> 28) - 8));
    return values;
}

int failures = 0;
void report(const char* what, bool good, const std::string& where) {
    std::printf("%-64s %s %s\n", what, good ? "ok" : "WRONG", where.c_str());
    failures += !good;
}

template <int N, bool left_rows, bool right_rows, bool left_registers>
void check_product(Device& device, int K, int missing) {
    // The last `missing` rows of the boxes lie beyond the tensors.
    const int left_box = left_rows ? K : 64, right_box = right_rows ? K : N, first_row = 8;
    const int left_columns = left_rows ? 64 : K, right_columns = right_rows ? N : K;
    const int left_T = first_row + left_box - missing, right_T = first_row + right_box - missing;
    const std::vector<bf16> left = whole_numbers(static_cast<size_t>(left_T) * left_columns, 1),
                            right = whole_numbers(static_cast<size_t>(right_T) * right_columns, 2);
    auto at = [&](const std::vector<bf16>& t, int T, int columns, int row, int column) {
        row += first_row;
        return row < T ? static_cast<float>(t[static_cast<size_t>(row) * columns + column]) : 0.0f;
    };
    const CUtensorMap left_map = panel_map(device.upload(left), 1, left_T, left_columns, left_box, left_columns / 64);
    const CUtensorMap right_map =
        panel_map(device.upload(right), 1, right_T, right_columns, right_box, right_columns / 64);
    float* out = device.upload(std::vector<float>(64 * N, -1.0f));
    auto* kernel = product_kernel<N, left_rows, right_rows, left_registers>;
    const int bytes = 2 * kRoom + 16;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<1, 128, bytes, stream_of(device.ctx)>>>(out, left_map, right_map, K, left_box, right_box, first_row);
    CHECK_LAUNCH("product_kernel");
    const std::vector<float> got = device.download(out, 64 * N);
    int wrong = 0;
    std::string where;
    for (int m = 0; m < 64; m++)
        for (int n = 0; n < N; n++) {
            float want = 0;
            for (int k = 0; k < K; k++)
                want += at(left, left_T, left_columns, left_rows ? k : m, left_rows ? m : k)
                        * at(right, right_T, right_columns, right_rows ? k : n, right_rows ? n : k);
            if (got[static_cast<size_t>(m * N + n)] == want) continue;
            if (wrong++ == 0) where = strf("first at (%d, %d): %g, not %g", m, n, got[m * N + n], want);
        }
    report(strf("wgmma 64 x %d x %d, A %s%s, B %s, %d rows beyond the end", N, K, left_rows ? "(K, M)" : "(M, K)",
                left_registers ? " in registers" : "", right_rows ? "(K, N)" : "(N, K)", missing).c_str(),
           wrong == 0, wrong ? strf("%d of %d, %s", wrong, 64 * N, where.c_str()) : "");
}

template <int N, int K, bool left_registers> void check_bytes_product(Device& device) {
    constexpr int kFirstRow = 16, kHeads = 3, kRows = kFirstRow + 128;
    auto numbers = [&](unsigned seed) {   // small: the tensor cores keep 14 bits of a sum
        std::vector<uint8_t> codes;
        for (const bf16 v : whole_numbers(size_t{kHeads} * kRows * K, seed))
            codes.push_back(to_fp8(Dtype::kE4m3, static_cast<float>(v) / 2));
        return codes;
    };
    const std::vector<uint8_t> left = numbers(4), right = numbers(5);
    auto at = [&](const std::vector<uint8_t>& t, int row, int k) {
        return from_fp8(Dtype::kE4m3, t[static_cast<size_t>((kRows + kFirstRow + row) * K + k)]);
    };
    const uint8_t *left_bytes = device.upload(left), *right_bytes = device.upload(right);
    float* out = device.upload(std::vector<float>(64 * N, -1.0f));
    auto* kernel = bytes_product_kernel<N, K, left_registers>;
    const int bytes = 2 * kRoom + 16;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<1, 128, bytes, stream_of(device.ctx)>>>(out, left_bytes + kRows * K,
                                                     byte_map(left_bytes, 1, kHeads, kRows, K, 64),
                                                     byte_map(right_bytes, 1, kHeads, kRows, K, N), kFirstRow);
    CHECK_LAUNCH("bytes_product_kernel");
    const std::vector<float> got = device.download(out, 64 * N);
    int wrong = 0;
    std::string where;
    for (int m = 0; m < 64; m++)
        for (int n = 0; n < N; n++) {
            float want = 0;
            for (int k = 0; k < K; k++) want += at(left, m, k) * at(right, n, k);
            if (got[static_cast<size_t>(m * N + n)] == want) continue;
            if (wrong++ == 0) where = strf("first at (%d, %d): %g, not %g", m, n, got[m * N + n], want);
        }
    report(strf("wgmma of E4M3, 64 x %d x %d, rows of %d bytes%s", N, K, K, left_registers ? ", A in registers" : "")
               .c_str(), wrong == 0, wrong ? strf("%d of %d, %s", wrong, 64 * N, where.c_str()) : "");
}

// Measures how many bits of a sum are kept: 1 + 2^-bits - 1, with 1 and -1 in the same instruction or in two.
void report_sum_bits(Device& device) {
    constexpr int N = 64, K = 128;
    auto bits_of = [&](bool earlier) {
        int kept = 0;
        for (int bits = 1; bits <= 24; bits++) {
            std::vector<uint8_t> left(2 * 80 * K), right(2 * 80 * K);
            auto set = [&](int k, float a, float b) {
                left[static_cast<size_t>((80 + 16) * K + k)] = to_fp8(Dtype::kE4m3, a);
                right[static_cast<size_t>((80 + 16) * K + k)] = to_fp8(Dtype::kE4m3, b);
            };
            // Powers of two of E4M3 go down to 2^-9: products to 2^-18, and 256 * 256 is 2^16.
            const int small = bits / 2 - 8, rest = bits - bits / 2 - 8;
            set(0, 256, 256);
            set(earlier ? 40 : 1, std::ldexp(1.0f, -small), std::ldexp(1.0f, -rest));
            set(earlier ? 100 : 2, -256, 256);
            const uint8_t *a = device.upload(left), *b = device.upload(right);
            float* out = device.upload(std::vector<float>(64 * N, -1.0f));
            auto* kernel = bytes_product_kernel<N, K, false>;
            kernel<<<1, 128, 2 * kRoom + 16, stream_of(device.ctx)>>>(out, a + 80 * K, byte_map(a, 1, 2, 80, K, 64),
                                                                      byte_map(b, 1, 2, 80, K, N), 16);
            CHECK_LAUNCH("bytes_product_kernel");
            if (device.download(out, 64 * N)[0] == std::ldexp(1.0f, 16 - bits)) kept = bits;
        }
        return kept;
    };
    const int within = bits_of(false), between = bits_of(true);
    report("sums of wgmma of E4M3 keep 13 binary places of the largest term", within >= 13 && between >= 13,
           strf("(%d within an instruction, %d from one to the next)", within, between));
}

void check_boxes(Device& device) {
    const int B = 3, T = 21, columns = 256, rows = 16, panels = 2, batch = 1, panel = 1;
    const std::vector<bf16> values = whole_numbers(static_cast<size_t>(B) * T * columns, 3);
    const bf16* from = device.upload(values);
    const int bytes = rows * panels * 128;
    CUDA_CHECK(cudaFuncSetAttribute(box_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRoom + 16));
    for (const int row : {0, 8, 16, 24}) {
        const std::vector<bf16> before(values.size(), bf16(99.0f));
        bf16* to = device.upload(before);
        uint32_t* raw = device.upload(std::vector<uint32_t>(bytes / 4, 0xffffffffu));
        box_kernel<<<1, 32, kRoom + 16, stream_of(device.ctx)>>>(
            raw, panel_map(from, B, T, columns, rows, panels), panel_map(to, B, T, columns, rows, panels), bytes, row,
            panel, batch);
        CHECK_LAUNCH("box_kernel");
        const std::vector<uint32_t> box = device.download(raw, bytes / 4);
        const std::vector<bf16> out = device.download(to, values.size());
        int wrong_in = 0, wrong_out = 0;
        for (int p = 0; p < panels; p++)
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < 64; c++) {
                    const int place = p * rows * 64 + r * 64 + ((c / 8) ^ (r % 8)) * 8 + c % 8, t = row + r;
                    const auto bits = static_cast<uint16_t>(box[place / 2] >> (place % 2 * 16));
                    const bf16 want = t < T ? values[(batch * T + t) * columns + (panel + p) * 64 + c] : bf16(0.0f);
                    wrong_in += bits != want.bits;
                }
        for (int i = 0; i < B * T * columns; i++) {
            const int c = i % columns, t = i / columns % T, b = i / columns / T;
            const bool inside = b == batch && t >= row && t < row + rows && c / 64 >= panel && c / 64 < panel + panels;
            wrong_out += out[i].bits != (inside ? values[i] : before[i]).bits;
        }
        report(strf("box of rows %d to %d of %d into shared memory", row, row + rows - 1, T).c_str(), wrong_in == 0,
               wrong_in ? strf("%d wrong", wrong_in) : "");
        report(strf("box of rows %d to %d of %d out of it", row, row + rows - 1, T).c_str(), wrong_out == 0,
               wrong_out ? strf("%d wrong", wrong_out) : "");
    }
}

// Checks that every tile of every head is visited once, for any grid.
void check_schedule(const AttentionShape& shape, int64_t heads_of_batch, int64_t rows, bool last_first) {
    const Schedule schedule = make_schedule(shape, heads_of_batch, rows, last_first, 132);
    std::vector<int> visits(schedule.items);
    uint32_t most = 0, least = 0xffffffffu;   // rows of tiles that a block meets
    for (uint32_t grid = std::min(schedule.items, 132u), block = 0; block < grid; block++) {
        uint32_t work = 0;
        for (uint32_t round = 0;; round++) {
            const uint32_t item = schedule.item(round, block, grid);
            if (item >= schedule.items) break;
            const auto [b, head, tile] = schedule.place(item);
            visits[(b * heads_of_batch + head) * schedule.tiles + tile]++;
            work += last_first ? tile + 1 : schedule.tiles - tile;
        }
        most = std::max(most, work), least = std::min(least, work);
    }
    const bool good = std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; });
    report(strf("order of %u tiles, heads of %u in sections of %u", schedule.items, schedule.tiles, schedule.section)
               .c_str(), good, strf("(work of a block %u to %u)", least, most));
}

}  // namespace

int main() try {
    check_schedule({.B = 1, .T = 8192, .NH = 32, .NKV = 8, .HS = 128, .softmax_mul = 1}, 32, 128, true);
    check_schedule({.B = 1, .T = 4096, .NH = 32, .NKV = 8, .HS = 128, .softmax_mul = 1}, 32, 128, true);
    check_schedule({.B = 8, .T = 2048, .NH = 16, .NKV = 4, .HS = 128, .softmax_mul = 1}, 16, 128, true);
    check_schedule({.B = 64, .T = 1024, .NH = 12, .NKV = 12, .HS = 64, .softmax_mul = 1}, 12, 192, true);
    check_schedule({.B = 4, .T = 1024, .NH = 25, .NKV = 25, .HS = 64, .softmax_mul = 1}, 25, 192, true);
    check_schedule({.B = 3, .T = 30000, .NH = 6, .NKV = 3, .HS = 128, .softmax_mul = 1}, 3, 128, false);
    check_schedule({.B = 1, .T = 17, .NH = 1, .NKV = 1, .HS = 64, .softmax_mul = 1}, 1, 128, false);
    Device device;
    check_boxes(device);
    check_product<64, false, false, false>(device, 64, 0);
    check_product<128, false, false, false>(device, 64, 5);
    check_product<128, false, false, false>(device, 128, 0);
    check_product<64, false, true, true>(device, 128, 0);
    check_product<128, false, true, true>(device, 128, 3);
    check_product<64, false, true, false>(device, 64, 0);
    check_product<128, false, true, false>(device, 128, 0);
    check_product<64, true, true, false>(device, 64, 0);
    check_product<128, true, true, false>(device, 128, 7);
    check_bytes_product<64, 64, false>(device);
    check_bytes_product<128, 64, false>(device);
    check_bytes_product<64, 128, false>(device);
    check_bytes_product<128, 128, false>(device);
    check_bytes_product<64, 128, true>(device);
    check_bytes_product<128, 128, true>(device);
    report_sum_bits(device);
    std::printf("%s\n", failures ? "WRONG" : "all as in plain loops");
    return failures != 0;
} catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return error.exit_code;
}
