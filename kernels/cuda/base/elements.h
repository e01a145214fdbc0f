// Consecutive elements of bf16 or float as floats, one or a 16-byte access at a time, and sums
// over the lanes of a warp.
#pragma once

#include "memory.h"
#include "numeric.h"

template <typename T>
DEVICE void unpack(const Vec16& vector, float* out) {
    for (int i = 0; i < 4; ++i) Element<T>::unpack(vector.w[i], out + i * Element<T>::per_word);
}

template <typename T>
DEVICE Vec16 pack(const float (&in)[Element<T>::per_vec16]) {
    Vec16 vector;
    for (int i = 0; i < 4; ++i) vector.w[i] = Element<T>::pack(in + i * Element<T>::per_word);
    return vector;
}

// COUNT consecutive elements as floats. More than one are loaded in the widest accesses that fit.
// `source` must then be aligned to 16 bytes, or to the size of all of them if that is smaller.
template <int COUNT, typename T>
DEVICE void load_elements(const T* source, float (&out)[COUNT]) {
    constexpr int bytes = COUNT * static_cast<int>(sizeof(T));
    if constexpr (COUNT == 1) {
        out[0] = Element<T>::load(source);
    } else if constexpr (bytes % 16 == 0) {
        for (int i = 0; i < bytes / 16; ++i)
            unpack<T>(load_vec16(source + i * Element<T>::per_vec16), out + i * Element<T>::per_vec16);
    } else if constexpr (bytes == 8) {
        const uint64_t pair = *reinterpret_cast<const uint64_t*>(source);
        Element<T>::unpack(static_cast<uint32_t>(pair), out);
        Element<T>::unpack(static_cast<uint32_t>(pair >> 32), out + Element<T>::per_word);
    } else {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(source);
        for (int i = 0; i < bytes / 4; ++i) Element<T>::unpack(words[i], out + i * Element<T>::per_word);
    }
}

// One element, or 8 or 16 bytes of them at a `target` with that alignment, in global memory.
template <int COUNT, typename T>
DEVICE void store_elements(T* target, const float (&in)[COUNT]) {
    if constexpr (COUNT == 1) {
        Element<T>::store(target, in[0]);
    } else if constexpr (COUNT * sizeof(T) == 8) {
        const uint64_t high = Element<T>::pack(in + Element<T>::per_word);
        *reinterpret_cast<uint64_t*>(target) = high << 32 | Element<T>::pack(in);
    } else {
        store_vec16_global(target, pack<T>(in));
    }
}

// COUNT elements as stored in memory: bf16 takes half the registers of floats, so twice as many
// are in flight. More than one are whole 16-byte accesses.
template <int COUNT, typename T>
struct Stored {
    static constexpr int VECTORS = COUNT / Element<T>::per_vec16;
    Vec16 vectors[VECTORS];
};
template <typename T>
struct Stored<1, T> {
    float number;
};

template <int COUNT, typename T>
DEVICE void load_stored(const T* source, Stored<COUNT, T>& stored) {
    if constexpr (COUNT == 1) {
        stored.number = Element<T>::load(source);
    } else {
        UNROLL
        for (int i = 0; i < Stored<COUNT, T>::VECTORS; ++i)
            stored.vectors[i] = load_vec16(source + i * Element<T>::per_vec16);
    }
}

template <int COUNT, typename T>
DEVICE void unpack_stored(const Stored<COUNT, T>& stored, float (&out)[COUNT]) {
    if constexpr (COUNT == 1) {
        out[0] = stored.number;
    } else {
        UNROLL
        for (int i = 0; i < Stored<COUNT, T>::VECTORS; ++i)
            unpack<T>(stored.vectors[i], out + i * Element<T>::per_vec16);
    }
}

// An even number of floats, each rounded to bf16.
template <int COUNT>
DEVICE void round_to_bf16(float (&x)[COUNT]) {
    UNROLL
    for (int i = 0; i < COUNT; i += 2) {
        const uint32_t pair = pack_bf16(x[i], x[i + 1]);
        x[i] = unpack_bf16_low(pair);
        x[i + 1] = unpack_bf16_high(pair);
    }
}

// Over the lanes of a warp that differ in bits below SPAN.
template <int SPAN, typename T>
DEVICE T sum_over_lanes(T value) {
    UNROLL
    for (int distance = SPAN / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(FULL_WARP, value, distance);
    return value;
}

// In every lane, with the same bits.
DEVICE float warp_sum(float value) {
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(FULL_WARP, value, distance);
    return value;
}

// Pieces of a row of `width` elements, each for a block of BLOCK_THREADS threads with COUNT
// elements a thread. Blocks are divided by it, in 32 bits: a 64-bit division would delay the first
// load.
template <int BLOCK_THREADS, int COUNT>
DEVICE uint32_t pieces_of(int32_t width) { return ceil_div(static_cast<uint32_t>(width), static_cast<uint32_t>(BLOCK_THREADS * COUNT)); }
