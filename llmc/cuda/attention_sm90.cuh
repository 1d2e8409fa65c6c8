// Shared by the attention kernels of compute capability 9.0: the schedule, masks and the online softmax.
#pragma once
#include "llmc/cuda/attention.cuh"
#include "llmc/cuda/pipeline_sm90.cuh"
#include "llmc/cuda/tensor_map.h"
#include "llmc/cuda/wgmma.cuh"

namespace cuda {

// ---- schedule. Items are tiles of heads. They are ordered by sections of heads whose keys and values fit in the L2
// cache together; within a section the longest items of all heads come first, so that the tail is short. Block b of G
// processes items b, 2G - 1 - b, 2G + b, 4G - 1 - b, ...: the block with the longest item of a round gets the shortest
// of the next. Counted in tiles, blocks stay within 3 % of the mean at the trainer's shapes (1 % with an atomic item
// counter) if a section has several rounds. The schedule keeps no state in memory: every run assigns the same items to
// the same blocks, and an aborted run leaves nothing behind.
struct Schedule {
    uint32_t items, heads, heads_of_batch, section, sections, tiles;   // the last section holds the remaining heads
    int group;         // query heads per key head
    bool last_first;   // a head's longest tile is the last one (queries), not the first (keys)

    struct Place {
        int b, head, tile;
    };
    __host__ __device__ uint32_t item(uint32_t round, uint32_t block, uint32_t blocks) const {
        return round * blocks + (round % 2 ? blocks - 1 - block : block);
    }
    __host__ __device__ Place place(uint32_t item) const {
        const uint32_t whole = item / (section * tiles), number = whole < sections ? whole : sections - 1;
        const uint32_t rest = item - number * (section * tiles);
        const uint32_t size = number == sections - 1 ? heads - number * section : section;
        const uint32_t step = rest / size, head = number * section + rest % size;
        return {static_cast<int>(head / heads_of_batch), static_cast<int>(head % heads_of_batch),
                static_cast<int>(last_first ? tiles - 1 - step : step)};
    }
};

// heads_of_batch: NH, or NKV where the items are tiles of key heads.
inline Schedule make_schedule(const AttentionShape& shape, int64_t heads_of_batch, int64_t rows_of_tile,
                              bool last_first, int64_t blocks) {
    constexpr int64_t kKeepBytes = 32 << 20;   // of an L2 cache of 50 or 60 MB
    constexpr int64_t kRounds = 8;             // of a section at least
    const int64_t key_head_bytes = 4 * shape.T * shape.HS, heads = shape.B * heads_of_batch;
    const int64_t per_key_head = heads_of_batch / shape.NKV, tiles = ceil_div(shape.T, rows_of_tile);
    const int64_t section = std::min(heads, std::max(std::max<int64_t>(1, kKeepBytes / key_head_bytes) * per_key_head,
                                                     ceil_div(kRounds * blocks, tiles)));
    CHECK(heads * tiles < (int64_t{1} << 31), "attention: %lld tiles", (long long)(heads * tiles));
    return {.items = static_cast<uint32_t>(heads * tiles), .heads = static_cast<uint32_t>(heads),
            .heads_of_batch = static_cast<uint32_t>(heads_of_batch), .section = static_cast<uint32_t>(section),
            .sections = static_cast<uint32_t>(ceil_div(heads, section)), .tiles = static_cast<uint32_t>(tiles),
            .group = static_cast<int>(shape.NH / shape.NKV), .last_first = last_first};
}

// ---- heads of `dim` columns in shared memory, in whole panels. A padded head, whose columns do not fill its last
// panel, has zeros in the rest, which the copies neither read nor write (head_map); then a box is one panel.
template <int dim> struct HeadPanels {
    static constexpr int kPanels = (dim + kPanel - 1) / kPanel;
    static constexpr bool kPadded = dim % kPanel != 0;
    static constexpr int kPlaces = kPadded ? 1 : kPanels;   // of the third coordinate of a box, per head

    // Of the heads in rows of `columns` elements, with boxes of `rows` rows and, unless padded, `panels` panels.
    static CUtensorMap map(const Tensor& tensor, const AttentionShape& shape, int64_t columns, int rows,
                           int panels = kPanels) {
        return kPadded ? head_map(tensor.data, shape.B, shape.T, columns, rows, shape.HS)
                       : panel_map(tensor.data, shape.B, shape.T, columns, rows, panels);
    }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900   // as in ptx.cuh
    template <int rows>
    __device__ static void load(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int row, int place, int b) {
        if constexpr (!kPadded) {
            ptx::load_box(shared, &map, barrier, row, place, b);
        } else {
            for (int p = 0; p < kPanels; p++)
                ptx::load_box(shared + p * rows * kPanelRowBytes, &map, barrier, row, place, b, p * kPanel);
        }
    }
    // Stores panel p of a head, given a map of one panel.
    __device__ static void store(const CUtensorMap& map, uint32_t shared, int row, int place, int p, int b) {
        if constexpr (!kPadded) ptx::store_box(&map, shared, row, place + p, b);
        else ptx::store_box(&map, shared, row, place, b, p * kPanel);
    }
#endif
};

// Calls launch with the head dim that the kernels are compiled for, as an integral constant.
template <typename Launch> void by_head_dim(int64_t HS, Launch launch) {
    if (HS == 64) launch(std::integral_constant<int, 64>{});
    else if (HS < 128) launch(std::integral_constant<int, 96>{});
    else if (HS == 128) launch(std::integral_constant<int, 128>{});
    else launch(std::integral_constant<int, 256>{});
}

// ---- scores of 64 rows in the registers of a warpgroup, in the layout of wgmma (wgmma.cuh)

// Sets s = -inf where the column comes after the row. ahead: the warp's first row minus the first column.
template <int count> __device__ inline void mask_future(float (&s)[count], int ahead, int lane) {
    const int last = ahead + lane / 4 - 2 * (lane % 4);   // last visible column, relative to this lane's
#pragma unroll
    for (int i = 0; i < count; i++) {
        if (8 * (i / 4) + i % 2 - 8 * half_of(i) > last) s[i] = -INFINITY;
    }
}
// Sets s = -inf where the column (a query) comes before the row (a key). behind: first column minus the warp's first
// row.
template <int count> __device__ inline void mask_past(float (&s)[count], int behind, int lane) {
    const int first = lane / 4 - 2 * (lane % 4) - behind;   // first visible column, relative to this lane's
#pragma unroll
    for (int i = 0; i < count; i++) {
        if (8 * (i / 4) + i % 2 - 8 * half_of(i) < first) s[i] = -INFINITY;
    }
}

// Replaces products q k by what the softmax multiplies by its factor, before any mask.
template <int count, bool kCap> __device__ inline void cap_scores(float (&s)[count], const SoftCap<bf16, kCap>& cap) {
    if constexpr (kCap) {
#pragma unroll
        for (float& x : s) x = cap.of(x);
    }
}

// ---- borders of documents and windows: the first key that a row (a query) attends to, or the end of the queries that
// attend to a row (a key), relative to the warp's first row. Both increase with the row, so one number tells which
// tiles need no mask.
struct FirstKeys {
    int of_row[2], latest;   // of the lane's rows; of the warp's last row

    __device__ FirstKeys(const AttentionShape& shape, int b, int row, int lane) {
        const int T = static_cast<int>(shape.T);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int query = row + 8 * half + lane / 4;
            of_row[half] = (query < T ? shape.first_key(b, query) : 0) - row;
        }
        latest = warp_uniform(row < T ? shape.first_key(b, min(row + 15, T - 1)) - row : -row);
    }
    // ahead: as in mask_future.
    template <int count> __device__ void mask(float (&s)[count], int ahead, int lane) const {
        if (latest + ahead <= 0) return;
        const int first[2] = {of_row[0] + ahead - 2 * (lane % 4), of_row[1] + ahead - 2 * (lane % 4)};
#pragma unroll
        for (int i = 0; i < count; i++) {
            if (8 * (i / 4) + i % 2 < first[half_of(i)]) s[i] = -INFINITY;
        }
    }
};
struct EndQueries {
    int of_row[2], earliest;   // of the lane's rows; of the warp's first row

    __device__ EndQueries(const AttentionShape& shape, int b, int row, int lane) {
        const int T = static_cast<int>(shape.T);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int key = row + 8 * half + lane / 4;
            of_row[half] = (key < T ? shape.end_query(b, key) : T) - row;
        }
        earliest = warp_uniform((row < T ? shape.end_query(b, row) : T) - row);
    }
    // behind: as in mask_past.
    template <int count> __device__ void mask(float (&s)[count], int behind, int lane) const {
        if (behind + 2 * count <= earliest) return;
        const int end[2] = {of_row[0] - behind - 2 * (lane % 4), of_row[1] - behind - 2 * (lane % 4)};
#pragma unroll
        for (int i = 0; i < count; i++) {
            if (8 * (i / 4) + i % 2 >= end[half_of(i)]) s[i] = -INFINITY;
        }
    }
};
// Every query attends to every key before it.
struct NoBorders {
    __device__ NoBorders(const AttentionShape&, int, int, int) {}
    template <int count> __device__ void mask(float (&)[count], int, int) const {}
};

// How far (as a power of two) a score may exceed the reference before the accumulators are rescaled, and the new
// reference for the largest score of a row. Every reference gives the same quotient; not following small growth saves
// most of the multiplications and the shuffles.
// kBias: what scores have in addition, before they are scaled.
struct LargestReference {
    static constexpr float kHeadroom = 8, kBias = 0;
    __device__ static float of(float largest) { return largest; }
};

// Online softmax state of a lane's two rows. kLogits: grow() also finds the largest score.
template <typename Reference, bool kLogits = false> struct RowSoftmaxWith {
    float reference[2] = {-INFINITY, -INFINITY};   // subtracted from the scaled scores, log2 units
    float sum[2] = {0, 0};                         // over this lane's columns
    float correction[2];                           // set by grow(): rescaling of earlier results
    float largest_score = 0;                       // of this lane, scaled, log2 units; at least 0

    // Sets new references in rows whose scores outgrew the old ones; returns whether any row of the warp did. Rows are
    // independent, so the bits of a query do not depend on the other queries in its tile, for example of other
    // documents.
    template <int count> __device__ bool grow(const float (&s)[count], float mul) {
        float most[4] = {s[0], s[2], s[4], s[6]};
#pragma unroll
        for (int i = 1; i < count; i++) {
            float& m = most[half_of(i) + 2 * (i / 4 % 2)];
            m = fmaxf(m, s[i]);
        }
        float largest[2] = {fmaxf(most[0], most[2]), fmaxf(most[1], most[3])};
        constexpr float kHeadroom = Reference::kHeadroom, kBias = Reference::kBias;
        for (float& score : largest) score = (kBias == 0 ? score : score - kBias) * mul;
        if (kLogits) largest_score = fmaxf(largest_score, fmaxf(largest[0], largest[1]));
        const bool outgrown = largest[0] > reference[0] + kHeadroom || largest[1] > reference[1] + kHeadroom;
        if (!__any_sync(0xffffffffu, outgrown)) return false;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float row_largest = warp_max<4>(largest[half]);
            const float next = row_largest > reference[half] + kHeadroom ? Reference::of(row_largest) : reference[half];
            correction[half] = exp2_approx(reference[half] - next);
            reference[half] = next;
            sum[half] *= correction[half];
        }
        return true;
    }
    // Replaces scores by P and adds them to `sum`.
    template <int count> __device__ void exponentials(float (&s)[count], float mul) {
        constexpr float kBias = Reference::kBias;
        float more[2] = {0, 0}, less[2] = {reference[0], reference[1]};
        if (kBias != 0) less[0] = fmaf(kBias, mul, less[0]), less[1] = fmaf(kBias, mul, less[1]);
#pragma unroll
        for (int i = 0; i < count; i++) {
            s[i] = exp2_approx(fmaf(s[i], mul, -less[half_of(i)]));
            if (i / 4 % 2) more[half_of(i)] += s[i];
            else sum[half_of(i)] += s[i];
        }
        sum[0] += more[0], sum[1] += more[1];
    }
    // Forces P (never negative) to be computed here: without the branch on its sum the assembler delays exponentials
    // until after waits for the products that they should overlap.
    __device__ void evaluate() const {
        if (sum[0] + sum[1] < 0) __nanosleep(1);
    }
    template <int count> __device__ void correct(float (&o)[count]) const {
#pragma unroll
        for (int i = 0; i < count; i++) o[i] *= correction[half_of(i)];
    }
};
template <bool kLogits> using RowSoftmax = RowSoftmaxWith<LargestReference, kLogits>;

// Stores a warp's 16 rows of results as bf16 into panels, from `shared` on.
template <uint32_t panel_bytes = 16 * kPanelRowBytes, int count>
__device__ inline void stage_rows(uint32_t shared, const float (&d)[count], int lane) {
    const uint32_t row = lane & 15;
#pragma unroll
    for (int j = 0; j < count / 8; j++) {
        uint32_t part[4];
        as_operand(part, d, j);
        const uint32_t chunk = 2 * j + (lane >> 4);
        ptx::store_matrix_x4(shared + chunk / 8 * panel_bytes + panel_offset(row, chunk % 8), part);
    }
}

}  // namespace cuda
