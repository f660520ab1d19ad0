// Rows of float32 or bfloat16 in memory, read and written as vectors of floats. For kernel files only, as vectors.h.
#pragma once
#include "vectors.h"

namespace {

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
    if (count >= kLanes) return E::store(to, x);
    uint8_t lanes[kLanes * E::kBytes];
    E::store(lanes, x);
    memcpy(to, lanes, count * E::kBytes);
}

template <class E> DS_INLINE const uint8_t* at(const void* array, int64_t element) {
    return (const uint8_t*)array + element * E::kBytes;
}

template <class E> DS_INLINE uint8_t* at(void* array, int64_t element) { return (uint8_t*)array + element * E::kBytes; }

}  // namespace
