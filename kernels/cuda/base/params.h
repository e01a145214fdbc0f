// Layout hashes of parameter structs.
//
// A kernel's parameters cross from Rust to CUDA as raw bytes. Both sides hash the same text, one
// "name:offset:size;" for each field. So a field that was moved, renamed, widened or forgotten on
// one side is an error when the module is loaded, not a wrong number later.
//
// C++ does not list the fields of a struct. The runtime does so for each struct that a KERNEL names
// (layouts.rs): a compiler gets `PARAMS_LAYOUT(ScaleParams, x, y, count)` after
//
//     struct ScaleParams { const float* x; float* y; int64_t count; };
//
// A struct has plain fields, without functions and initialisers. Sources may also write the list.
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
#define PARAMS_FIELD(S, f) .field(#f, PARAMS_OFFSET(S, f), sizeof(S::f))

// PARAMS_FIELD of each field. A macro does not expand within itself: each names the next one
// without calling it. Every scan of PARAMS_EXPAND calls what the scan before has named, so up to
// 64 fields can be listed.
#define PARAMS_EXPAND(...) PARAMS_SCANS_16(PARAMS_SCANS_16(PARAMS_SCANS_16(PARAMS_SCANS_16(__VA_ARGS__))))
#define PARAMS_SCANS_16(...) PARAMS_SCANS_4(PARAMS_SCANS_4(PARAMS_SCANS_4(PARAMS_SCANS_4(__VA_ARGS__))))
#define PARAMS_SCANS_4(...) PARAMS_SCAN(PARAMS_SCAN(PARAMS_SCAN(PARAMS_SCAN(__VA_ARGS__))))
#define PARAMS_SCAN(...) __VA_ARGS__
#define PARAMS_CALL ()
#define PARAMS_NEXT() PARAMS_EACH
#define PARAMS_EACH(S, f, ...) PARAMS_FIELD(S, f) __VA_OPT__(PARAMS_NEXT PARAMS_CALL(S, __VA_ARGS__))

// Fields in the order in which the struct declares them; the Rust mirror hashes the same order.
#define PARAMS_LAYOUT(S, ...)                                                                    \
    constexpr uint64_t layout_hash(S*) {                                                         \
        return LayoutHash{} PARAMS_EXPAND(PARAMS_EACH(S, __VA_ARGS__)).value;                    \
    }
