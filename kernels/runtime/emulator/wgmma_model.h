// What a GPU's tensor cores make of a warpgroup's matrix product (wgmma), on the host: included by `wgmma.h` where the emulator
// compiles it.
#pragma once

namespace emulator {

// A descriptor counts in units of 16 bytes: what is left over is lost, and a GPU reads another operand in silence.
inline void require_whole_units(uint32_t bytes) {
    if (bytes % 16) stop({}, "a wgmma descriptor is given a stride or an advance that is no multiple of 16 bytes");
}

constexpr int WGMMA_WARPS = 4;       // of a warpgroup
constexpr int WGMMA_ROWS = 16;       // that one warp computes
constexpr int WGMMA_K = 16;
constexpr uint32_t POISON = ~0u;     // a NaN

// An operand in shared memory, as its descriptor says.
struct Operand {
    uint32_t start, block_stride, group_stride;
    bool transposed;

    EMULATOR_INLINE Operand(uint64_t descriptor, bool transposed)
        : start((descriptor & 0x3fff) << 4),
          block_stride((descriptor >> 16 & 0x3fff) << 4),
          group_stride((descriptor >> 32 & 0x3fff) << 4),
          transposed(transposed) {}

    // Where the 16 bytes begin that hold 8 elements from (mn, k) on, along the direction that is
    // contiguous; that one of mn and k is a multiple of 8.
    EMULATOR_INLINE uint32_t chunk(uint32_t mn, uint32_t k) const {
        const uint32_t linear = transposed
            ? start + mn % 64 * 2 + mn / 64 * block_stride + k % 8 * 128 + k / 8 * group_stride
            : start + mn % 8 * 128 + mn / 8 * group_stride + k * 2;
        return linear ^ (linear >> 7 & 7) << 4;
    }
    // End of the last row of 128 bytes that `extent` elements of m or n reach.
    uint64_t end(uint32_t extent) const {
        const uint64_t blocks = transposed ? (extent - 1) / 64 : 0, groups = transposed ? 1 : (extent - 1) / 8;
        const uint64_t last = start + blocks * block_stride + groups * group_stride + 7 * 128;
        return last / 128 * 128 + 128;
    }
};

// Why a descriptor cannot be used, or null.
inline const char* descriptor_fault(uint64_t descriptor, bool transposed, uint32_t extent) {
    if (descriptor >> 62 != 1) return "a wgmma descriptor asks for another swizzle than that of 128 bytes";
    if (descriptor >> 49 & 7) return "a wgmma descriptor has a base offset other than 0";
    if (Operand(descriptor, transposed).end(extent) > context->dynamic_shared_bytes)
        return "an operand of a wgmma reaches beyond the dynamic shared memory";
    return nullptr;
}

// elements[i] is element i of the 16 bytes at `offset`.
EMULATOR_INLINE void read_bf16(const AsyncReads& reads, uint32_t offset, float (&elements)[8]) {
    uint32_t pairs[4];
    reads.chunk(offset, pairs);
    for (int i = 0; i < 8; ++i) elements[i] = bf16_half(pairs[i / 2], i % 2);
}

// Calls put(mn, k, element) for EXTENT elements of m or n, of which `first` is number 0, and all k.
template <int EXTENT, typename Put>
EMULATOR_INLINE void read_operand(const AsyncReads& reads, const Operand& operand, int first, Put put) {
    float elements[8];
    if (operand.transposed) {
        for (int k = 0; k < WGMMA_K; ++k)
            for (int mn = 0; mn < EXTENT; mn += 8) {
                read_bf16(reads, operand.chunk(first + mn, k), elements);
                for (int i = 0; i < 8; ++i) put(mn + i, k, elements[i]);
            }
    } else {
        for (int mn = 0; mn < EXTENT; ++mn)
            for (int k = 0; k < WGMMA_K; k += 8) {
                read_bf16(reads, operand.chunk(first + mn, k), elements);
                for (int i = 0; i < 8; ++i) put(mn, k + i, elements[i]);
            }
    }
}

// Calls visit(lane's accumulator, its place in values [16, COLUMNS]) for all of them.
template <int COLUMNS, typename Visit>
EMULATOR_INLINE void each_accumulator(const WarpProduct& product, Visit visit) {
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int n = 0; n < COLUMNS / 8; ++n)
            for (int i = 0; i < 4; ++i)
                visit(product.accumulators[lane][4 * n + i], (g + 8 * (i >> 1)) * COLUMNS + 8 * n + 2 * t + (i & 1));
    }
}

template <int COLUMNS>
UNWATCHED inline void wgmma_capture(const WarpProduct* product, float* values) {
    each_accumulator<COLUMNS>(*product, [&](float& accumulator, int place) EMULATOR_LAMBDA {
        values[place] = accumulator;
        accumulator = __uint_as_float(POISON);
    });
}

template <int COLUMNS>
UNWATCHED inline uint32_t wgmma_deliver(const WarpProduct* product, const float* values) {
    uint32_t touched = 0;
    each_accumulator<COLUMNS>(*product, [&](float& accumulator, int place) EMULATOR_LAMBDA {
        touched |= __float_as_uint(accumulator) != POISON;
        accumulator = values[place];
    });
    return touched;
}

// values = A B or values += A B, as block_sum adds.
template <int COLUMNS>
WIDE_VECTORS inline void wgmma_multiply(const WarpProduct* product, const AsyncReads* reads, float* values) {
    Scaled a[WGMMA_ROWS][WGMMA_K];
    bool finite = true;
    const auto seen = [&](float x) EMULATOR_LAMBDA { finite &= is_finite(x); return x; };
    if (product->a_in_registers) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i)
                for (int half = 0; half < 2; ++half)
                    a[lane / 4 + 8 * (i & 1)][lane % 4 * 2 + half + 8 * (i >> 1)].set(
                        seen(bf16_half(product->a_registers[lane][i], half)));
    } else {
        const Operand operand(product->a_descriptor, product->a_transposed);
        read_operand<WGMMA_ROWS>(*reads, operand, WGMMA_ROWS * product->warp, [&](int m, int k, float x) EMULATOR_LAMBDA { a[m][k].set(seen(x)); });
    }
    const bool finite_rows = finite;
    const Operand operand(product->b_descriptor, product->b_transposed);
    for (int first = 0; first < COLUMNS; first += 8) {
        ScaledColumns b[WGMMA_K];
        finite = finite_rows;
        read_operand<8>(*reads, operand, first, [&](int n, int k, float x) EMULATOR_LAMBDA { b[k].set(n, seen(x)); });
        for (int m = 0; m < WGMMA_ROWS; ++m) {
            float* row = values + m * COLUMNS + first;
            if (!product->accumulate) std::memset(row, 0, 8 * sizeof(float));
            block_sum(a[m], b, finite, row);
        }
    }
}

// The exponent of a number of e4m3, as scale_of has it: that of the smallest normal one where it is subnormal.
UNWATCHED inline float scale_of_e4m3(float x) {
    const float scale = scale_of(x);
    return scale > 0 && scale < 0x1p-6f ? 0x1p-6f : scale;
}

// Products of e4m3 numbers that Hopper adds in one step, 2^bits that they keep below the exponent of the largest term, and the
// fraction bits of a sum.
constexpr int E4M3_TERMS = 32;
constexpr double E4M3_ALIGNED = 1 << 13;
constexpr int E4M3_FRACTION_BITS = 13;

// x with so many bits below its leading one, towards zero.
UNWATCHED inline double cut_to_fraction(double x, int bits) {
    uint64_t word;
    std::memcpy(&word, &x, sizeof(word));
    word &= ~((1ull << (52 - bits)) - 1);
    std::memcpy(&x, &word, sizeof(word));
    return x;
}

// As block_sum, of e4m3 numbers by wgmma: terms are cut off sooner, and so is their sum.
WIDE_VECTORS OPTIMISED inline void block_sum_e4m3(const Scaled* a, const ScaledColumns* b, bool finite, float* row) {
    Doubles c, largest;
    for (int n = 0; n < 8; ++n) c[n] = row[n], largest[n] = scale_of(row[n]), finite &= is_finite(row[n]);
    if (!finite) {
        FiniteTerms<E4M3_TERMS> terms;
        terms.take(a, b, row);
        block_sum_e4m3(terms.a, terms.b, true, terms.row);
        return terms.give(row);
    }
    for (int k = 0; k < E4M3_TERMS; ++k) {
        const Doubles scale = a[k].scale * b[k].scale;
        largest = largest > scale ? largest : scale;
    }
    // A block of zeros has no exponent: any will do.
    largest = largest > 0 ? largest : largest + 1;
    const Doubles finest = largest * (1 / E4M3_ALIGNED), steps = 1 / finest;
    // In units of the finest bit no term reaches 2^16.
    Doubles sum = __builtin_convertvector(__builtin_convertvector(c * steps, Words), Doubles);
    for (int k = 0; k < E4M3_TERMS; ++k)
        sum += __builtin_convertvector(__builtin_convertvector(a[k].value * steps * b[k].value, Words), Doubles);
    Doubles done = sum * finest;
    for (int n = 0; n < 8; ++n) done[n] = cut_to_fraction(done[n], E4M3_FRACTION_BITS);
    toward_zero(done, row);
}

// Calls put(mn, k, element) for EXTENT elements of m or n, of which `first` is number 0, and all 32 k of an operand of e4m3.
template <int EXTENT, typename Put>
EMULATOR_INLINE void read_operand_e4m3(const AsyncReads& reads, const Operand& operand, int first, Put put) {
    for (int mn = 0; mn < EXTENT; ++mn)
        for (int k = 0; k < E4M3_TERMS; k += 16) {
            uint32_t words[4];
            // Two codes take the place of a number of bf16.
            reads.chunk(operand.chunk(first + mn, k / 2), words);
            for (int i = 0; i < 16; ++i)
                put(mn, k + i, to_float(fp8_e4m3{static_cast<uint8_t>(words[i / 4] >> 8 * (i % 4))}));
        }
}

// values = A B or values += A B, as block_sum_e4m3 adds.
template <int COLUMNS>
WIDE_VECTORS inline void wgmma_multiply_e4m3(const WarpProduct* product, const AsyncReads* reads, float* values) {
    Scaled a[WGMMA_ROWS][E4M3_TERMS];
    bool finite_rows = true;
    const Operand rows(product->a_descriptor, false), columns(product->b_descriptor, false);
    const auto put = [&](int m, int k, float x) EMULATOR_LAMBDA {
        a[m][k].value = x, a[m][k].scale = scale_of_e4m3(x), finite_rows &= is_finite(x);
    };
    if (product->a_in_registers) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i)
                for (int byte = 0; byte < 4; ++byte)
                    put(lane / 4 + 8 * (i & 1), lane % 4 * 4 + byte + 16 * (i >> 1),
                        to_float(fp8_e4m3{static_cast<uint8_t>(product->a_registers[lane][i] >> 8 * byte)}));
    } else {
        read_operand_e4m3<WGMMA_ROWS>(*reads, rows, WGMMA_ROWS * product->warp, put);
    }
    for (int first = 0; first < COLUMNS; first += 8) {
        ScaledColumns b[E4M3_TERMS];
        bool finite = finite_rows;
        read_operand_e4m3<8>(*reads, columns, first, [&](int n, int k, float x) EMULATOR_LAMBDA {
            b[k].value[n] = x, b[k].scale[n] = scale_of_e4m3(x), finite &= is_finite(x);
        });
        for (int m = 0; m < WGMMA_ROWS; ++m) {
            float* row = values + m * COLUMNS + first;
            if (!product->accumulate) std::memset(row, 0, 8 * sizeof(float));
            block_sum_e4m3(a[m], b, finite, row);
        }
    }
}

struct WgmmaPayload {
    float* accumulators;
    uint32_t a[4];
    uint64_t a_descriptor, b_descriptor;
    uint32_t accumulate;
};

template <int COLUMNS, bool A_IN_REGISTERS, bool A_TRANSPOSED, bool B_TRANSPOSED, bool OF_E4M3 = false>
UNWATCHED inline void wgmma_op(void* const* payloads, uint32_t) {
    const auto& first = *static_cast<const WgmmaPayload*>(payloads[0]);
    WarpProduct product{first.a_descriptor, first.b_descriptor, COLUMNS, context->warp % WGMMA_WARPS, A_IN_REGISTERS,
                        A_TRANSPOSED, B_TRANSPOSED, first.accumulate, {}, {}, wgmma_capture<COLUMNS>,
                        OF_E4M3 ? wgmma_multiply_e4m3<COLUMNS> : wgmma_multiply<COLUMNS>, wgmma_deliver<COLUMNS>};
    for (int lane = 0; lane < 32; ++lane) {
        const auto& payload = *static_cast<const WgmmaPayload*>(payloads[lane]);
        if (payload.a_descriptor != first.a_descriptor || payload.b_descriptor != first.b_descriptor ||
            payload.accumulate != first.accumulate)
            return host->fail(context, "the lanes of a warp disagree about a wgmma's descriptors or accumulation");
        product.accumulators[lane] = payload.accumulators;
        std::memcpy(product.a_registers[lane], payload.a, sizeof(payload.a));
    }
    const char* fault = descriptor_fault(first.b_descriptor, B_TRANSPOSED, COLUMNS);
    if (!A_IN_REGISTERS && !fault) fault = descriptor_fault(first.a_descriptor, A_TRANSPOSED, WGMMA_ROWS * WGMMA_WARPS);
    if (fault) return host->fail(context, fault);
    host->wgmma_issue(context, &product);
}

template <int COLUMNS, bool A_TRANSPOSED, bool B_TRANSPOSED>
inline void wgmma_shared(float* d, uint64_t a, uint64_t b, bool accumulate) {
    WgmmaPayload payload{d, {}, a, b, accumulate};
    collective(FULL_WARP, "wgmma", wgmma_op<COLUMNS, false, A_TRANSPOSED, B_TRANSPOSED>, payload);
}

template <int COLUMNS, bool B_TRANSPOSED>
inline void wgmma_registers(float* d, const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    WgmmaPayload payload{d, {a[0], a[1], a[2], a[3]}, 0, b, accumulate};
    collective(FULL_WARP, "wgmma", wgmma_op<COLUMNS, true, false, B_TRANSPOSED>, payload);
}

template <int COLUMNS>
inline void wgmma_shared_e4m3(float* d, uint64_t a, uint64_t b, bool accumulate) {
    WgmmaPayload payload{d, {}, a, b, accumulate};
    collective(FULL_WARP, "wgmma", wgmma_op<COLUMNS, false, false, false, true>, payload);
}

template <int COLUMNS>
inline void wgmma_registers_e4m3(float* d, const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    WgmmaPayload payload{d, {a[0], a[1], a[2], a[3]}, 0, b, accumulate};
    collective(FULL_WARP, "wgmma", wgmma_op<COLUMNS, true, false, false, true>, payload);
}

template <int PENDING>
inline void wgmma_wait_op(void* const*, uint32_t) { host->wgmma_wait(context, PENDING); }

template <int PENDING>
inline void wgmma_wait() {
    SyncPayload payload;
    collective(FULL_WARP, "wgmma_wait", wgmma_wait_op<PENDING>, payload);
}

}  // namespace emulator
