// Layout hashes of parameter structs.
//
// A kernel's parameters cross from Rust to CUDA as raw bytes. Both sides hash the same text, one
// "name:offset:size;" for each field, so that a field that was moved, renamed, widened or
// forgotten on one side is an error when the module is loaded, not a wrong number later.
//
//     struct ScaleParams { const float* x; float* y; int64_t count; };
//     PARAMS_LAYOUT(ScaleParams, x, y, count)
#pragma once

struct LayoutHash {
    uint64_t value = 0xcbf29ce484222325ull;  // FNV-1a, 64 bits

    constexpr LayoutHash byte(uint8_t b) const {
        LayoutHash next;
        next.value = (value ^ b) * 0x100000001b3ull;
        return next;
    }
    constexpr LayoutHash text(const char* s) const {
        LayoutHash h = *this;
        for (; *s; ++s) h = h.byte(static_cast<uint8_t>(*s));
        return h;
    }
    constexpr LayoutHash number(uint64_t n) const {
        char digits[20] = {};
        int count = 0;
        do {
            digits[count++] = static_cast<char>('0' + n % 10);
            n /= 10;
        } while (n);
        LayoutHash h = *this;
        while (count) h = h.byte(static_cast<uint8_t>(digits[--count]));
        return h;
    }
    constexpr LayoutHash field(const char* name, uint64_t offset, uint64_t size) const {
        return text(name).text(":").number(offset).text(":").number(size).text(";");
    }
};

#if defined(PARITY_EMULATOR)
#define PARAMS_OFFSET(S, f) __builtin_offsetof(S, f)
#else
#define PARAMS_OFFSET(S, f) __INTADDR__(&((static_cast<S*>(nullptr))->f))
#endif
#define PARAMS_EXPAND(x) x
#define PARAMS_FIELD(S, f) .field(#f, PARAMS_OFFSET(S, f), sizeof(S::f))
#define PARAMS_1(S, a) PARAMS_FIELD(S, a)
#define PARAMS_2(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_1(S, __VA_ARGS__))
#define PARAMS_3(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_2(S, __VA_ARGS__))
#define PARAMS_4(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_3(S, __VA_ARGS__))
#define PARAMS_5(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_4(S, __VA_ARGS__))
#define PARAMS_6(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_5(S, __VA_ARGS__))
#define PARAMS_7(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_6(S, __VA_ARGS__))
#define PARAMS_8(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_7(S, __VA_ARGS__))
#define PARAMS_9(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_8(S, __VA_ARGS__))
#define PARAMS_10(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_9(S, __VA_ARGS__))
#define PARAMS_11(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_10(S, __VA_ARGS__))
#define PARAMS_12(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_11(S, __VA_ARGS__))
#define PARAMS_13(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_12(S, __VA_ARGS__))
#define PARAMS_14(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_13(S, __VA_ARGS__))
#define PARAMS_15(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_14(S, __VA_ARGS__))
#define PARAMS_16(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_15(S, __VA_ARGS__))
#define PARAMS_17(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_16(S, __VA_ARGS__))
#define PARAMS_18(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_17(S, __VA_ARGS__))
#define PARAMS_19(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_18(S, __VA_ARGS__))
#define PARAMS_20(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_19(S, __VA_ARGS__))
#define PARAMS_21(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_20(S, __VA_ARGS__))
#define PARAMS_22(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_21(S, __VA_ARGS__))
#define PARAMS_23(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_22(S, __VA_ARGS__))
#define PARAMS_24(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_23(S, __VA_ARGS__))
#define PARAMS_25(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_24(S, __VA_ARGS__))
#define PARAMS_26(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_25(S, __VA_ARGS__))
#define PARAMS_27(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_26(S, __VA_ARGS__))
#define PARAMS_28(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_27(S, __VA_ARGS__))
#define PARAMS_29(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_28(S, __VA_ARGS__))
#define PARAMS_30(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_29(S, __VA_ARGS__))
#define PARAMS_31(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_30(S, __VA_ARGS__))
#define PARAMS_32(S, a, ...) PARAMS_FIELD(S, a) PARAMS_EXPAND(PARAMS_31(S, __VA_ARGS__))
#define PARAMS_PICK(_1, _2, _3, _4, _5, _6, _7, _8, _9, _10, _11, _12, _13, _14, _15, _16, _17,  \
                    _18, _19, _20, _21, _22, _23, _24, _25, _26, _27, _28, _29, _30, _31, _32,   \
                    chosen, ...) chosen

// Fields in the order in which the struct declares them; the Rust mirror hashes the same order.
#define PARAMS_LAYOUT(S, ...)                                                                    \
    constexpr uint64_t layout_hash(S*) {                                                         \
        return LayoutHash{} PARAMS_EXPAND(PARAMS_PICK(                                           \
            __VA_ARGS__, PARAMS_32, PARAMS_31, PARAMS_30, PARAMS_29, PARAMS_28, PARAMS_27,       \
            PARAMS_26, PARAMS_25, PARAMS_24, PARAMS_23, PARAMS_22, PARAMS_21, PARAMS_20,         \
            PARAMS_19, PARAMS_18, PARAMS_17, PARAMS_16, PARAMS_15, PARAMS_14, PARAMS_13,         \
            PARAMS_12, PARAMS_11, PARAMS_10, PARAMS_9, PARAMS_8, PARAMS_7, PARAMS_6, PARAMS_5,   \
            PARAMS_4, PARAMS_3, PARAMS_2, PARAMS_1)(S, __VA_ARGS__)).value;                      \
    }
