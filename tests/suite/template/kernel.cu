// y = factor x, element by element (inference 3): an operator that only a test adds.
//
// A thread takes one element of a row. Floor: each element read and written once.
// Defines: ELEMENT, bf16 or float. Launch: ceil(num_rows width / 256) blocks.
#include "element.h"
#include "elements.h"

constexpr int THREADS = 256;

struct ScaledRowsParams {
    const ELEMENT* x; int64_t x_row_stride;  // [num_rows, width]
    ELEMENT* y; int64_t y_row_stride;        // as x
    int64_t num_rows;
    int32_t width;
    float factor;
};

KERNEL(scaled_rows, ScaledRowsParams, THREADS) {
    const int64_t element = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    const int64_t row = element / params.width, column = element % params.width;
    if (row >= params.num_rows) return;
    const float x = Element<ELEMENT>::load(params.x + row * params.x_row_stride + column);
    Element<ELEMENT>::store(params.y + row * params.y_row_stride + column, params.factor * x);
}
