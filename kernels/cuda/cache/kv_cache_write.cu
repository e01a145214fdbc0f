// Quantizes rows of K = V and scatters them to slots of the paged cache (inference 5.4, 8.3,
// 13.2).
//
//     row  = cache[slots[t]]       untouched where the slot is negative or not below num_slots
//     amax = max |x|, at least 1e-4, over each group of 64 of the first NOPE_DIM channels
//     s    = 2^ceil(log2(amax * fp32(1/448)))        one e8m0 byte; padding of the scales is 0
//     code = e4m3(x / s)                             nearest even; |x / s| <= 448 by choice of s
//     the other channels are copied bit by bit
//
// A group with a NaN or an infinity has no finite scale. Its scale byte is 255 and its codes are
// NaN, so that it decodes to NaN and not to plausible values. Slots must be distinct: which of two
// tokens wins is undefined.
//
// One warp takes a token, eight channels a lane and step, so a group is eight neighbouring lanes.
// A row is read whether or not its slot exists: its loads do not wait for the slot.
//
// Floor: 2 * HEAD_DIM bytes read, DATA_BYTES + SCALE_BYTES written for a token (1024 and 584 in
// the model's format), at 4 operations a channel: 65536 tokens are 105 MB, 25 us at 4.24 TB/s.
// Measured on one H200: 31.3 us (79 %). What limits it: memory.
// Defines: NOPE_DIM, e4m3 channels, a multiple of 64 up to 512 (0: a bf16 cache); ROPE_DIM, bf16
// channels, a multiple of 8. Launch: ceil(num_tokens / 8) blocks of 256 threads.
// What was tried: kernels/docs/kv_cache_write.md.
#include "elements.h"
#include "group_write.h"
#include "math.h"

#if !defined(NOPE_DIM) || !defined(ROPE_DIM)
#error "define NOPE_DIM and ROPE_DIM"
#endif

using Row = CacheRow<NOPE_DIM, ROPE_DIM>;

constexpr int THREADS = 256;
constexpr int TOKENS_PER_BLOCK = THREADS / WARP_SIZE;

struct KvCacheWriteParams {
    const bf16* kv;        // [num_tokens, NOPE_DIM + ROPE_DIM], 16-byte aligned rows
    int64_t kv_stride;     // elements
    const int32_t* slots;  // [num_tokens]
    uint8_t* pages;        // [num_pages, page bytes], 16-byte aligned pages
    int64_t pages_stride;  // bytes
    int32_t num_tokens;
    int32_t num_slots;
    int32_t page_size;
};

constexpr int ROW_CHUNKS = Row::HEAD_DIM / LANE_CHANNELS;
// Steps of a warp over a row and over its scales; a row with scales has eight.
constexpr int STEPS = ceil_div(maximum(ROW_CHUNKS, Row::SCALE_BYTES * GROUP_LANES), static_cast<int>(WARP_SIZE));

DEVICE int chunk_of(int step) { return step * static_cast<int>(WARP_SIZE) + lane_id(); }

// A lane's part of a row, one chunk a step; zeros past the row's end. All loads start before the
// first wait.
struct Chunks {
    Vec16 x[STEPS];

    void load(const bf16* source) {
        UNROLL
        for (int step = 0; step < STEPS; ++step) {
            const int chunk = chunk_of(step);
            x[step] = chunk < ROW_CHUNKS ? load_vec16_streaming(source + chunk * LANE_CHANNELS) : Vec16{{0, 0, 0, 0}};
        }
    }
};

KERNEL(kv_cache_write, KvCacheWriteParams, THREADS) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * TOKENS_PER_BLOCK + threadIdx.x / WARP_SIZE;
    if (token >= params.num_tokens) return;
    const PagedRows<uint8_t> cache{params.pages, params.pages_stride, params.page_size, params.num_slots};
    const int32_t slot = params.slots[token];
    Chunks row;
    row.load(params.kv + token * params.kv_stride);
    const bool wanted = cache.holds(slot);
    const int32_t target = wanted ? slot : 0;
    uint8_t* data = cache.data<Row>(target);
    UNROLL
    for (int step = 0; step < STEPS; ++step) {
        const int chunk = chunk_of(step);
        if constexpr (NOPE_DIM > 0) {
            float x[LANE_CHANNELS];
            unpack<bf16>(row.x[step], x);
            write_group<Row>(x, row.x[step], chunk * LANE_CHANNELS, data, cache.scales<Row>(target), wanted,
                             [](const uint32_t (&)[2], uint8_t) {});
        }
        const int copied = chunk - NOPE_DIM / LANE_CHANNELS;
        if (wanted && copied >= 0 && chunk < ROW_CHUNKS) store_vec16(data + NOPE_DIM + 16 * copied, row.x[step]);
    }
}
