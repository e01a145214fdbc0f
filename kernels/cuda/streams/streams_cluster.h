// For kernels that need a token's channels again after sums over all of them, and read its
// residual streams once (sm_90a). mhc_head_hopper.cu and mhc_head_hopper_backward.cu have the
// formulas.
//
// A cluster of CLUSTER blocks has a run of consecutive tokens. A block has an eighth of the
// channels of all rows of a token, a thread OWN of them in each row. They are still in the block's
// shared memory when the sums are known.
//
// TMA (cp.async.bulk) loads a token's rows one by one, TOKENS tokens (a batch) at a time, to a
// ring of RING batches. One batch is added up, the one before it is finished, and the next is in
// flight. A batch has SUMS sums in the cluster. They are added over the lanes of a warp, and each
// step halves the sums that a lane has. Then they are added over the warps through shared memory,
// and over the blocks, each of which stores its sums to all. Every sum has the same order,
// wherever the token is in the batch. Equal launches give equal bits, and a token's bits do not
// depend on its neighbours.
//
// A batch's sums are sent before the previous batch is finished, so no thread waits for stores
// between blocks. A block stores its sums round-robin in one of PLACES slots of the others. A slot
// is reused after four batches. By then all blocks have sent their sums of the batch two after the
// old one, and so have read the old sums.
#pragma once

#include "hopper.h"
#include "streams.h"

constexpr uint32_t CLUSTER = 8;
constexpr int OWN = 4;   // channels of a row
constexpr int RING = 3;  // batches
constexpr int PIECE = 8;  // channels of 16 bytes
constexpr uint32_t PLACES = 4;

// Sums of VALUES values of each of 2 DISTANCE lanes over these lanes: sum i is in the lanes from i
// 2 DISTANCE / VALUES on. A lane gives away half of its values and adds the other lane's part to
// those that it keeps. The last steps have one value left.
template <int DISTANCE, int VALUES>
DEVICE float lane_sums(const float (&values)[VALUES]) {
    if constexpr (DISTANCE == 0) {
        return values[0];
    } else if constexpr (VALUES == 1) {
        const float sum[1] = {values[0] + __shfl_xor_sync(FULL_WARP, values[0], DISTANCE)};
        return lane_sums<DISTANCE / 2>(sum);
    } else {
        const bool upper = lane_id() & DISTANCE;
        float sums[VALUES / 2];
        UNROLL
        for (int v = 0; v < VALUES / 2; ++v) {
            const float given = upper ? values[v] : values[v + VALUES / 2], kept = upper ? values[v + VALUES / 2] : values[v];
            sums[v] = kept + __shfl_xor_sync(FULL_WARP, given, DISTANCE);
        }
        return lane_sums<DISTANCE / 2>(sums);
    }
}

// A block's share: the channels from `column` on of its cluster's tokens. A block past the last
// channel has none, and takes part in the sums.
struct Share {
    int64_t first;  // token
    int32_t count;  // of tokens
    int32_t column, width;
    int32_t own;  // the thread's first channel, counted from `column`
    bool exists;  // the thread's channels
    bool whole;   // those of all of its warp

    template <typename Params>
    explicit Share(const Params& params) {
        const int32_t slice = ceil_div<int32_t>(params.hidden_size, CLUSTER * PIECE) * PIECE;
        first = static_cast<int64_t>(blockIdx.x / CLUSTER) * params.run;
        count = static_cast<int32_t>(minimum<int64_t>(params.num_tokens - first, params.run));
        column = static_cast<int32_t>(cluster_rank()) * slice;
        width = maximum(minimum(params.hidden_size - column, slice), 0);
        own = static_cast<int32_t>(threadIdx.x) * OWN;
        exists = own < width;
        whole = uniform((warp_id() + 1) * static_cast<int32_t>(WARP_SIZE) * OWN <= width);
    }
};

// Shared memory of a cluster's block of WARPS warps.
template <int WARPS_, int TOKENS_, int ROWS_, int SUMS_>
struct ClusterShared {
    // TOKENS and SUMS are those of a batch, ROWS those of a token.
    static constexpr int WARPS = WARPS_, TOKENS = TOKENS_, ROWS = ROWS_, SUMS = SUMS_;
    static constexpr int CHANNELS = WARPS * static_cast<int>(WARP_SIZE) * OWN;  // of a row, at most
    alignas(16) bf16 rows[RING][TOKENS][ROWS][CHANNELS];
    uint64_t full[RING], told[PLACES];  // mbarriers: a batch has landed; the sums of all blocks have
    float of_warps[2][WARPS][SUMS];
    float of_blocks[PLACES][CLUSTER][SUMS];
};

template <typename Shared>
DEVICE void initialise_cluster(Shared& shared) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < RING; ++stage) mbarrier_init(shared_address(&shared.full[stage]), 1);
        for (uint32_t place = 0; place < PLACES; ++place) mbarrier_init(shared_address(&shared.told[place]), 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    cluster_arrive_relaxed();
}

// The batches of a block's run, one after another.
template <typename Shared>
struct Batches {
    Shared& shared;
    const Share& share;
    int64_t first;  // token of the batch
    int32_t left;   // tokens of it and behind it
    uint32_t number = 0, stage = 0, phase = 0;

    // Called by all threads; starts the copies of the first batches.
    template <typename Params>
    Batches(const Params& params, Shared& shared, const Share& share)
        : shared(shared), share(share), first(share.first), left(share.count) {
        for (int ahead = 0; ahead < RING; ++ahead) start(params, ahead, ahead);
    }

    bool exists() const { return left > 0; }
    // Whether all tokens of the batch and all channels of the warp exist.
    bool whole() const { return share.whole && left >= Shared::TOKENS; }
    // Whether the thread's channels of a token exist.
    bool has(int token) const { return share.exists && token < left; }
    const bf16* row(int token, int row) const { return &shared.rows[stage][token][row][share.own]; }

    // Starts the copies of the batch that is `ahead` batches ahead; source_of gives a row's
    // address. Each warp issues some of the rows: one warp's lane would issue all of them one
    // after another while the block waits for it.
    template <typename Params>
    void start(const Params& params, int ahead, uint32_t to) const {
        const int rows = minimum(left - ahead * Shared::TOKENS, Shared::TOKENS) * Shared::ROWS;
        if (lane_id() != 0 || rows <= 0 || share.width == 0) return;
        const SharedAddress full = shared_address(&shared.full[to]);
        const uint32_t bytes = share.width * sizeof(bf16);
        if (warp_id() == 0) mbarrier_arrive_expect(full, rows * bytes);
        for (int at = warp_id(); at < rows; at += Shared::WARPS) {
            const int token = at / Shared::ROWS, row = at % Shared::ROWS;
            bulk_copy_in(shared_address(shared.rows[to][token][row]),
                         source_of(params, first + ahead * Shared::TOKENS + token, row) + share.column, bytes, full);
        }
    }

    void wait() const {
        if (share.width > 0) mbarrier_wait(shared_address(&shared.full[stage]), phase);
    }

    // A warp's part of the sums of the batch.
    float* own_sums() const { return shared.of_warps[number % 2][warp_id()]; }

    // Sends this block's part of the batch's sums to every block of the cluster, after all warps
    // have stored theirs.
    void tell() const {
        constexpr int RANKS = WARP_SIZE / Shared::SUMS;  // that a warp tells at a time
        __syncthreads();
        const int sum = lane_id() % Shared::SUMS;
        const SharedAddress told = shared_address(&shared.told[number % PLACES]);
        if (threadIdx.x == 0) mbarrier_arrive_expect(told, CLUSTER * Shared::SUMS * sizeof(float));
        float own = 0.0f;
        UNROLL
        for (int warp = 0; warp < Shared::WARPS; ++warp) own += shared.of_warps[number % 2][warp][sum];
        const SharedAddress place = shared_address(&shared.of_blocks[number % PLACES][cluster_rank()][sum]);
        for (uint32_t rank = warp_id() * RANKS + lane_id() / Shared::SUMS; rank < CLUSTER; rank += Shared::WARPS * RANKS)
            store_at(place, __float_as_uint(own), told, rank);
    }

    // What all blocks have sent, added in their order.
    float sum(int place) const {
        mbarrier_wait(shared_address(&shared.told[number % PLACES]), number / PLACES % 2);
        float sum = 0.0f;
        UNROLL
        for (uint32_t rank = 0; rank < CLUSTER; ++rank) sum += shared.of_blocks[number % PLACES][rank][place];
        return sum;
    }

    // All threads are done with the batch: another one is copied to its slot.
    template <typename Params>
    void next(const Params& params) {
        __syncthreads();
        start(params, RING, stage);
        go_on();
    }

    Batches following() const {
        Batches next = *this;
        next.go_on();
        return next;
    }
    void go_on() {
        first += Shared::TOKENS;
        left -= Shared::TOKENS;
        ++number;
        phase ^= stage == RING - 1 ? 1 : 0;
        stage = stage == RING - 1 ? 0 : stage + 1;
    }
};
