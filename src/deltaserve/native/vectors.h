// Vectors of the width that the file is compiled for: 16, 8 or 4 floats. For kernel files only; all is internal to them.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t ShortVec __attribute__((vector_size(2 * kLanes)));
typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));

#define DS_INLINE inline __attribute__((always_inline))

template <class V> DS_INLINE V load_as(const void* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

DS_INLINE Vec load(const float* from) { return load_as<Vec>(from); }
DS_INLINE void store(float* to, Vec v) { memcpy(to, &v, sizeof v); }
DS_INLINE Vec all(float x) { return Vec{} + x; }
DS_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }

DS_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Lane i of the result is the sum of the lanes of v[i], added in the same order for every i.
DS_INLINE Vec sums_of(const Vec* v) {
#if defined(__AVX512F__)
    __m512 quad[4];
    for (int i = 0; i < 4; i++) {
        const __m512 a = (__m512)v[4 * i], b = (__m512)v[4 * i + 1], c = (__m512)v[4 * i + 2], d = (__m512)v[4 * i + 3];
        const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        quad[i] = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    }
    for (int i = 0; i < 4; i += 2)
        quad[i] = _mm512_add_ps(_mm512_shuffle_f32x4(quad[i], quad[i + 1], 0x44),
                                _mm512_shuffle_f32x4(quad[i], quad[i + 1], 0xee));
    return (Vec)_mm512_add_ps(_mm512_shuffle_f32x4(quad[0], quad[2], 0x88),
                              _mm512_shuffle_f32x4(quad[0], quad[2], 0xdd));
#elif defined(__AVX2__)
    __m256 quad[2];
    for (int i = 0; i < 2; i++) {
        const __m256 ab = _mm256_hadd_ps((__m256)v[4 * i], (__m256)v[4 * i + 1]);
        const __m256 cd = _mm256_hadd_ps((__m256)v[4 * i + 2], (__m256)v[4 * i + 3]);
        quad[i] = _mm256_hadd_ps(ab, cd);
    }
    return (Vec)_mm256_add_ps(_mm256_permute2f128_ps(quad[0], quad[1], 0x20),
                              _mm256_permute2f128_ps(quad[0], quad[1], 0x31));
#else
    const IntVec low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
    const Vec ab = __builtin_shuffle(v[0], v[1], low) + __builtin_shuffle(v[0], v[1], high);
    const Vec cd = __builtin_shuffle(v[2], v[3], low) + __builtin_shuffle(v[2], v[3], high);
    return __builtin_shuffle(ab, cd, first) + __builtin_shuffle(ab, cd, second);
#endif
}

DS_INLINE float sum_of(Vec v) {
    float lanes[kLanes];
    store(lanes, v);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

DS_INLINE float largest_of(Vec v) {
    float lanes[kLanes];
    store(lanes, v);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}

// 2^x for x <= 127, 0 below -126; not a number stays that.
DS_INLINE Vec exp2_of(Vec x) {
    const Vec shift = all(12582912.f);  // 1.5 * 2^23: the sum's last bits are x rounded to an integer
    const Vec shifted = x + shift;
    const Vec f = x - (shifted - shift);
    Vec p = all(1.5403530e-4f);
    p = multiply_add(p, f, all(1.3333558e-3f));
    p = multiply_add(p, f, all(9.6181291e-3f));
    p = multiply_add(p, f, all(5.5504109e-2f));
    p = multiply_add(p, f, all(2.4022651e-1f));
    p = multiply_add(p, f, all(6.9314718e-1f));
    p = multiply_add(p, f, all(1.f));
    const Vec power = (Vec)(((WordVec)shifted << 23) + 0x3f800000u);
    return x < -126.f ? Vec{} : p * power;
}

DS_INLINE float exp2_of(float x) { return exp2_of(all(x))[0]; }

// Element types of memory. load: kLanes of them as floats.

struct Float32 {
    static constexpr int kBytes = 4;
    static DS_INLINE Vec load(const uint8_t* from) { return load_as<Vec>(from); }
};

struct BFloat16 {
    static constexpr int kBytes = 2;
    static DS_INLINE Vec load(const uint8_t* from) {
#if defined(__AVX512F__)
        return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
        return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#else
        return (Vec)(__builtin_convertvector(load_as<ShortVec>(from), WordVec) << 16);
#endif
    }
};

#if !defined(__AVX2__)
DS_INLINE Vec from_half_bits(IntVec bits) {
    const IntVec magnitude = bits & 0x7fff;
    const IntVec special = magnitude >= 0x7c00 ? IntVec{} + 0x7f800000 : IntVec{};
    const Vec value = (Vec)(magnitude << 13) * all(5.192296858534828e33f);  // 2^112: the exponents' biases differ by it
    return (Vec)((WordVec)value | (WordVec)special | ((WordVec)(bits & 0x8000) << 16));
}
#endif

struct Float16 {
    static constexpr int kBytes = 2;
    static DS_INLINE Vec load(const uint8_t* from) {
#if defined(__AVX512F__)
        return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
        return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
        return from_half_bits(__builtin_convertvector(load_as<ShortVec>(from), IntVec));
#endif
    }
};

// e4m3: its bits moved by 7 are those of a half whose value is 1/256 of it, denormals too. 0x7f is not a number.
struct Float8 {
    static constexpr int kBytes = 1;
    static DS_INLINE Vec load(const uint8_t* from) {
#if defined(__AVX512F__)
        const __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from));
        const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f));
        const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
        const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x80)), 8);
        const __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), _mm256_or_si256(sign, nan));
        return (Vec)_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.f));
#elif defined(__AVX2__)
        const __m128i bits = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from));
        const __m128i magnitude = _mm_and_si128(bits, _mm_set1_epi16(0x7f));
        const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
        const __m128i sign = _mm_slli_epi16(_mm_and_si128(bits, _mm_set1_epi16(0x80)), 8);
        const __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), _mm_or_si128(sign, nan));
        return (Vec)_mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.f));
#else
        const IntVec bits = __builtin_convertvector(load_as<ByteVec>(from), IntVec);
        const IntVec magnitude = bits & 0x7f;
        const IntVec nan = magnitude == 0x7f ? IntVec{} + 0x7fff : IntVec{};
        return from_half_bits((magnitude << 7) | nan | ((bits & 0x80) << 8)) * all(256.f);
#endif
    }
};

// One value at a time, for the inputs and outputs of a row.

DS_INLINE float from_bfloat16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
}

DS_INLINE uint16_t to_bfloat16(float x) {  // to the nearest, even of two
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

DS_INLINE float from_float16(uint16_t bits) {
    _Float16 x;
    memcpy(&x, &bits, 2);
    return (float)x;
}

DS_INLINE uint16_t to_float16(float x) {
    const _Float16 half = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}

}  // namespace
