// The coefficients of a token's residual streams from their projection (inference 2.2, training 11.1): lane 4 i + j of
// 16 has the column of comb[i,j], and lanes 0 to 7 have those of pre and post besides. A kernel's parameters name what
// is read (scale, base) and written (pre, post, comb, mix).
#pragma once

#include "projection.h"
#include "sinkhorn.h"

// Stores the coefficient of one of the first eight lanes and its column `mix`. Returns sigmoid(mix scale + base) +
// hc_eps, which is pre of the first four.
template <typename Params>
DEVICE float store_gate(const Params& params, int64_t token, int lane, float mix) {
    const float s = sigmoid(mix * params.scale[lane / STREAMS] + params.base[lane]);
    const float pre = s + params.hc_eps;
    if (lane < STREAMS) params.pre[token * STREAMS + lane] = pre;
    if (lane >= STREAMS) params.post[token * STREAMS + lane - STREAMS] = 2.0f * s;
    params.mix[token * COLUMNS + lane] = mix;
    return pre;
}

// Stores comb of the column `mix` and that column, where the token `exists`: all lanes of the warp take part.
template <typename Params>
DEVICE void store_comb(const Params& params, int64_t token, int lane, bool exists, float mix) {
    const float m = row_softmax(mix * params.scale[2] + params.base[2 * STREAMS + lane]) + params.hc_eps;
    float comb = m;
    for (int pass = 1; pass <= sinkhorn_passes(params.sinkhorn_iters); ++pass)
        comb *= sinkhorn_factor(comb, pass, params.hc_eps);
    if (!exists) return;
    params.comb[token * MATRIX_LANES + lane] = comb;
    params.mix[token * COLUMNS + 2 * STREAMS + lane] = mix;
}
