// Rows of float32 or bfloat16 in memory, read and written as vectors of floats. For kernel files only, as vectors.h.
#pragma once
#include "vectors.h"

namespace {

DS_INLINE WordVec bfloat16_bits(Vec x) {  // in the upper half of each word; to the nearest, even of two
    const WordVec bits = (WordVec)x;
    const WordVec nearest = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    return x == x ? nearest : WordVec{} + 0x7fc00000u;
}

// Elements as they are computed with: `rounded` is what a store and a load would make of a value.

template <class E> struct Element;

template <> struct Element<Float32> {
    static DS_INLINE Vec rounded(Vec x) { return x; }
    static DS_INLINE void store(uint8_t* to, Vec x) { memcpy(to, &x, sizeof x); }
};

template <> struct Element<BFloat16> {
    static DS_INLINE Vec rounded(Vec x) { return (Vec)bfloat16_bits(x); }
    static DS_INLINE void store(uint8_t* to, Vec x) {
        const ShortVec bits = __builtin_convertvector(bfloat16_bits(x) >> 16, ShortVec);
        memcpy(to, &bits, sizeof bits);
    }
};

// A row in memory, read and written kLanes channels at a time; the last ones of a row may be fewer.

template <class E> DS_INLINE Vec load_some(const uint8_t* row, int64_t channel, int64_t count) {
    const uint8_t* from = row + channel * E::kBytes;
    if (count >= kLanes) return E::load(from);
    uint8_t lanes[kLanes * E::kBytes] = {};
    memcpy(lanes, from, count * E::kBytes);
    return E::load(lanes);
}

template <class E> DS_INLINE void store_some(uint8_t* row, int64_t channel, int64_t count, Vec x) {
    uint8_t* to = row + channel * E::kBytes;
    if (count >= kLanes) return Element<E>::store(to, x);
    uint8_t lanes[kLanes * E::kBytes];
    Element<E>::store(lanes, x);
    memcpy(to, lanes, count * E::kBytes);
}

template <class E> DS_INLINE const uint8_t* at(const void* array, int64_t element) {
    return (const uint8_t*)array + element * E::kBytes;
}

template <class E> DS_INLINE uint8_t* at(void* array, int64_t element) { return (uint8_t*)array + element * E::kBytes; }

}  // namespace
