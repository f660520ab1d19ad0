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

// prefix##isa where `isa` is a macro: it is expanded first.
#define DS_JOIN(a, b) a##b
#define DS_NAME(prefix, isa) DS_JOIN(prefix, isa)

// A number as a type: lambdas take it for their templates' arguments.
template <int kCount> struct Count {
    static constexpr int value = kCount;
};

template <class V> DS_INLINE V load_as(const void* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

DS_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

DS_INLINE Vec load(const float* from) { return load_as<Vec>(from); }
DS_INLINE void store(float* to, Vec v) { memcpy(to, &v, sizeof v); }
DS_INLINE Vec all(float x) { return x - Vec{}; }  // 0 + x would be a sum of its own: x may be -0
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

// Lane j of v[i] becomes lane i of v[j].
DS_INLINE void transpose(Vec* v) {
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)v[i], (__m512i)v[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)v[i], (__m512i)v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        v[i] = (Vec)_mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        v[i + 8] = (Vec)_mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
        v[i + 4] = (Vec)_mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0x88);
        v[i + 12] = (Vec)_mm512_shuffle_i32x4(a[i + 4], a[i + 12], 0xdd);
    }
#elif defined(__AVX2__)
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        v[i] = (Vec)_mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        v[i + 4] = (Vec)_mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
#else
    const IntVec low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
    const Vec a = __builtin_shuffle(v[0], v[1], low), b = __builtin_shuffle(v[0], v[1], high);
    const Vec c = __builtin_shuffle(v[2], v[3], low), d = __builtin_shuffle(v[2], v[3], high);
    v[0] = __builtin_shuffle(a, c, first);
    v[1] = __builtin_shuffle(a, c, second);
    v[2] = __builtin_shuffle(b, d, first);
    v[3] = __builtin_shuffle(b, d, second);
#endif
}

// The order in which sums_of adds up lanes: neighbours here meet first, then their sums.
#if defined(__AVX512F__)
constexpr int kSumOrder[] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
#elif defined(__AVX2__)
constexpr int kSumOrder[] = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr int kSumOrder[] = {0, 2, 1, 3};
#endif

// Lane i of the result is the sum of the lanes of v[i].
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

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t IntQuad __attribute__((vector_size(16)));

// One vector of four lanes from all: halves meet, then quarters. `meet` is of two vectors of any width.
template <class Meet> DS_INLINE float folded(Vec v, Meet meet) {
#if defined(__AVX512F__)
    const __m256 half = (__m256)meet(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    Quad quad = (Quad)meet(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
    Quad quad = (Quad)meet(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#else
    Quad quad = v;
#endif
    quad = meet(quad, __builtin_shuffle(quad, IntQuad{2, 3, 0, 1}));
    return meet(quad, __builtin_shuffle(quad, IntQuad{1, 0, 3, 2}))[0];
}

// Stays in its register: compilers read memory once more where they take registers for scarce.
DS_INLINE Vec held(Vec v) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(v));
#elif defined(__AVX2__)
    __asm__("" : "+x"(v));
#endif
    return v;
}

DS_INLINE float sum_of(Vec v) {
    return folded(v, [](auto a, auto b) { return a + b; });
}

DS_INLINE float largest_of(Vec v) {
    return folded(v, [](auto a, auto b) { return a > b ? a : b; });
}

// 2^x for x <= 127, to 1.5e-7 of it, and 1 of 0; 0 far below (AVX-512: below -149, others: below -126); not a number
// stays that.
DS_INLINE Vec exp2_of(Vec x) {
#if defined(__AVX512F__)
    const Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x less the integer below it; 0 of infinity
    Vec p = all(1.86713005e-3f);  // fitted so that the error is least where 2^0 is 1
    p = multiply_add(p, f, all(9.01703071e-3f));
    p = multiply_add(p, f, all(5.57999127e-2f));
    p = multiply_add(p, f, all(2.40164444e-1f));
    p = multiply_add(p, f, all(6.93151295e-1f));
    p = multiply_add(p, f, all(1.f));
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
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
#endif
}

DS_INLINE float exp2_of(float x) { return exp2_of(all(x))[0]; }

// Element types of memory. load: kLanes of them as floats; store: rounded to the nearest, even of two. rounded: what a store
// and a load would make of a value.

struct Float32 {
    static constexpr int kBytes = 4;
    static DS_INLINE Vec load(const uint8_t* from) { return load_as<Vec>(from); }
    static DS_INLINE void store(uint8_t* to, Vec v) { memcpy(to, &v, sizeof v); }
    static DS_INLINE Vec rounded(Vec v) { return v; }
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
#if defined(__AVX512BF16__)  // denormal numbers become 0
    static DS_INLINE void store(uint8_t* to, Vec v) {
        _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)v));
    }
    static DS_INLINE Vec rounded(Vec v) {
        const __m512i bits = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v));
        return (Vec)_mm512_slli_epi32(bits, 16);
    }
#else
    static DS_INLINE void store(uint8_t* to, Vec v) {
        const ShortVec high = __builtin_convertvector((WordVec)rounded(v) >> 16, ShortVec);
        memcpy(to, &high, sizeof high);
    }
    static DS_INLINE Vec rounded(Vec v) {
        const WordVec bits = (WordVec)v;
        const WordVec nearest = v == v ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
        return (Vec)(nearest & 0xffff0000u);
    }
#endif
};

#if !defined(__AVX2__)
DS_INLINE Vec from_half_bits(IntVec bits) {
    const IntVec magnitude = bits & 0x7fff;
    const IntVec special = magnitude >= 0x7c00 ? IntVec{} + 0x7f800000 : IntVec{};
    const Vec value = (Vec)(magnitude << 13) * all(5.192296858534828e33f);  // 2^112: the exponents' biases differ by it
    return (Vec)((WordVec)value | (WordVec)special | ((WordVec)(bits & 0x8000) << 16));
}

// The nearest halves, of two the even one. Not by _Float16: older compilers lack it, and older libraries what it calls.
DS_INLINE WordVec to_half_bits(Vec v) {
    const WordVec bits = (WordVec)v, magnitude = bits & 0x7fffffff;
    const WordVec normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13;  // the biases differ by 112
    const WordVec denormal = (WordVec)((Vec)magnitude + all(0.5f)) - 0x3f000000;  // of 0.5 the last bit is a denormal's
    const WordVec finite = magnitude < 0x38800000 ? denormal : normal;
    const WordVec nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
    const WordVec special = magnitude > 0x7f800000 ? nan : WordVec{} + 0x7c00;
    return (magnitude < 0x47800000 ? finite : special) | (bits >> 16 & 0x8000);
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
    static DS_INLINE void store(uint8_t* to, Vec v) {
#if defined(__AVX512F__)
        _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
        _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
        const ShortVec halves = __builtin_convertvector(to_half_bits(v), ShortVec);
        memcpy(to, &halves, sizeof halves);
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

// A row of elements as floats; the channels from `dim` to `padded_dim` are 0.
template <class Element> DS_INLINE void unpack(const uint8_t* from, int dim, float* to, int padded_dim) {
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(to + d, Element::load(from + d * Element::kBytes));
    if (d < dim) {
        uint8_t rest[kLanes * Element::kBytes] = {};
        memcpy(rest, from + d * Element::kBytes, (dim - d) * Element::kBytes);
        store(to + d, Element::load(rest));
        d += kLanes;
    }
    for (; d < padded_dim; d += kLanes) store(to + d, Vec{});
}

// Floats times `factor` as a row of elements.
template <class Element> DS_INLINE void put_row(const float* from, float factor, int dim, uint8_t* to) {
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) Element::store(to + d * Element::kBytes, load(from + d) * all(factor));
    if (d == dim) return;
    float last[kLanes] = {};
    memcpy(last, from + d, (dim - d) * sizeof(float));
    uint8_t rest[kLanes * Element::kBytes];
    Element::store(rest, load(last) * all(factor));
    memcpy(to + d * Element::kBytes, rest, (dim - d) * Element::kBytes);
}

}  // namespace
