// The coefficients of a token's residual streams from their projection (inference 2.2, training
// 11.1). Two layouts. Four lanes a token: lane i has pre[i], post[i] and the row of source i. One
// warp a token: a lane has a column. The caller's Params name what is loaded (scale, base) and
// stored (pre, post, comb, mix).
#pragma once

#include "projection.h"
#include "sinkhorn.h"

// ---------------------------------------------------------------- sums of many parts

// With few tokens the channels are split into many partials. FEW_WARPS warps of the token's block
// add them round-robin, a column a lane. PARTS_AT_ONCE loads are in flight at once. One warp then
// adds the warps' sums in their order. FEW_WARPS splits of the same groups, which are round-robin
// as well, have these sums.
constexpr int FEW_WARPS = 8, PARTS_AT_ONCE = 16;
using SumsOfWarps = float[FEW_WARPS][WARP_SIZE];

// A lane's share of the partials. The constructor starts the first loads, long before they are
// added.
struct PartsOfWarp {
    const float* next;
    int64_t apart;
    int32_t left;
    float asked[PARTS_AT_ONCE];

    template <typename Params>
    PartsOfWarp(const Params& params, int64_t token) {
        const int64_t one = params.num_tokens * PARTIAL_WIDTH<COLUMNS>;
        apart = FEW_WARPS * one;
        next = params.partials + warp_id() * one + token * PARTIAL_WIDTH<COLUMNS> + lane_id();
        left = lane_id() <= COLUMNS ? (params.splits - warp_id() + FEW_WARPS - 1) / FEW_WARPS : 0;
        ask();
    }
    void ask() {
        UNROLL
        for (int i = 0; i < PARTS_AT_ONCE; ++i, next += apart) asked[i] = i < left ? *next : 0.0f;
    }
    float sum() {
        float sum = 0.0f;
        UNROLL_BY(1)
        while (true) {
            UNROLL
            for (int i = 0; i < PARTS_AT_ONCE; ++i) sum += asked[i];
            left -= PARTS_AT_ONCE;
            if (left <= 0) return sum;
            ask();
        }
    }
};

// A lane's column of the token, from the sums that the warps stored.
DEVICE float sum_of_warps(const SumsOfWarps& sums) {
    float sum = 0.0f;
    UNROLL
    for (int warp = 0; warp < FEW_WARPS; ++warp) sum += sums[warp][lane_id()];
    return sum;
}

// ---------------------------------------------------------------- coefficients

// Stores the coefficient of one of the first eight lanes and its column `mix`; z is its logit.
// Returns sigmoid(z) + hc_eps, which is pre in the first four lanes.
template <typename Params>
DEVICE float store_gate_of(const Params& params, int64_t token, int lane, float mix, float z) {
    const float s = sigmoid(z);
    const float pre = s + params.hc_eps;
    if (lane < STREAMS) params.pre[token * STREAMS + lane] = pre;
    if (lane >= STREAMS) params.post[token * STREAMS + lane - STREAMS] = 2.0f * s;
    params.mix[token * COLUMNS + lane] = mix;
    return pre;
}

template <typename Params>
DEVICE float store_gate(const Params& params, int64_t token, int lane, float mix) {
    return store_gate_of(params, token, lane, mix, mix * params.scale[lane / STREAMS] + params.base[lane]);
}

// The scale and the base of a lane's column, loaded before the lane has the column.
struct LogitOf {
    float scale, base;

    template <typename Params>
    LogitOf(const Params& params, int column) {
        const bool exists = column < COLUMNS;
        scale = exists ? params.scale[minimum(column / STREAMS, 2)] : 0.0f;
        base = exists ? params.base[column] : 0.0f;
    }
    float operator()(float mix) const { return mix * scale + base; }
};

// The logit of element 4 i + j, and the element after the softmax.
template <typename Params>
DEVICE float comb_logit(const Params& params, int element, float mix) {
    return mix * params.scale[2] + params.base[2 * STREAMS + element];
}
template <typename Params>
DEVICE float behind_softmax(const Params& params, float p) {
    return p + params.hc_eps;
}

template <typename Params>
DEVICE int passes_of(const Params& params) {
    return sinkhorn_passes(params.sinkhorn_iters);
}

// Stores an element of comb and its column `mix`.
template <typename Params>
DEVICE void store_element(const Params& params, int64_t token, int element, float comb, float mix) {
    params.comb[token * MATRIX_LANES + element] = comb;
    params.mix[token * COLUMNS + 2 * STREAMS + element] = mix;
}

// Turns a row of logits into the row that the Sinkhorn iteration starts with.
template <typename Params>
DEVICE void begin_with_row(const Params& params, float (&row)[STREAMS]) {
    softmax_of_row(row);
    UNROLL
    for (int j = 0; j < STREAMS; ++j) row[j] = behind_softmax(params, row[j]);
}

// Computes and stores comb of a token by four lanes, the row of source `lane` in each.
template <typename Params>
DEVICE void store_comb_row(const Params& params, int64_t token, int lane, bool exists, const float (&mix)[STREAMS]) {
    float row[STREAMS];
    UNROLL
    for (int j = 0; j < STREAMS; ++j) row[j] = comb_logit(params, STREAMS * lane + j, mix[j]);
    begin_with_row(params, row);
    sinkhorn_of_rows(row, passes_of(params), params.hc_eps);
    if (!exists) return;
    UNROLL
    for (int j = 0; j < STREAMS; ++j) store_element(params, token, STREAMS * lane + j, row[j], mix[j]);
}

// One token a warp: a lane's column and its logit. The first eight lanes have sigmoid + hc_eps,
// which is pre in the first four.
struct ColumnOfOne {
    float mix, z, gate;
};

// One warp stores rstd, pre and post of a token whose partials the block's warps have added.
// store_comb_of_one continues from the result; its passes depend on each other.
template <typename Params>
DEVICE ColumnOfOne store_gates_of_one(const Params& params, int64_t token, const SumsOfWarps& sums, const LogitOf& logit) {
    const float sum = sum_of_warps(sums);
    const float rstd = streams_rstd(params, __shfl_sync(FULL_WARP, sum, COLUMNS)), mix = rstd * sum, z = logit(mix);
    if (lane_id() == 0) params.rstd[token] = rstd;
    return {mix, z, lane_id() < 2 * STREAMS ? store_gate_of(params, token, lane_id(), mix, z) : 0.0f};
}

// As store_comb_row, by a warp: lane 2 STREAMS + e holds column 2 STREAMS + e and its logit z.
template <typename Params>
DEVICE void store_comb_of_one(const Params& params, int64_t token, const ColumnOfOne& own) {
    const int source = lane_id() % STREAMS;
    float row[STREAMS];
    UNROLL
    for (int j = 0; j < STREAMS; ++j) row[j] = __shfl_sync(FULL_WARP, own.z, 2 * STREAMS + STREAMS * source + j);
    begin_with_row(params, row);
    sinkhorn_of_one(row, passes_of(params), params.hc_eps);
    UNROLL
    for (int j = 0; j < STREAMS; ++j) {
        const float mix = __shfl_sync(FULL_WARP, own.mix, 2 * STREAMS + STREAMS * source + j);
        if (lane_id() < STREAMS) store_element(params, token, STREAMS * source + j, row[j], mix);
    }
}
