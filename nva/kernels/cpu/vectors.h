// Short vectors in the compiler's own terms (GCC and Clang vector extensions), so that one source serves AVX-512, AVX2
// and NEON. Numbers are stored as T, float or bf16; arithmetic is float32. Read next: matmul.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

#define ALWAYS_INLINE __attribute__((always_inline)) inline

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct bf16 {  // the upper half of a float
    uint16_t bits;
};

inline Floats splat(float x) { return Floats{} + x; }

// The first n numbers at p, then zeros; all LANES of them where n isn't given.
inline Floats load(const float* p, int n = LANES) {
    Floats x{};
    if (n == LANES) std::memcpy(&x, p, sizeof x);
    else std::memcpy(&x, p, 4 * n);
    return x;
}

inline Floats load(const bf16* p, int n = LANES) {
    Halves x{};
    if (n == LANES) std::memcpy(&x, p, sizeof x);
    else std::memcpy(&x, p, 2 * n);
    return (Floats)(__builtin_convertvector(x, Words) << 16);
}

// Rounded to the nearest bf16, ties to even; NaN stays NaN.
inline Halves narrowed(Floats x) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
    Words bits = (Words)x;
    Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    Words is_nan = (Words)(x != x);
    return __builtin_convertvector((is_nan & 0x7FC0) | (~is_nan & rounded), Halves);
#endif
}

inline void store(float* p, Floats x, int n = LANES) {
    if (n == LANES) std::memcpy(p, &x, sizeof x);
    else std::memcpy(p, &x, 4 * n);
}

inline void store(bf16* p, Floats x, int n = LANES) {
    Halves narrow = narrowed(x);
    if (n == LANES) std::memcpy(p, &narrow, sizeof narrow);
    else std::memcpy(p, &narrow, 2 * n);
}

// x as it would be after a round trip through memory.
inline Floats rounded(Floats x, const float*) { return x; }
inline Floats rounded(Floats x, const bf16*) { return (Floats)(__builtin_convertvector(narrowed(x), Words) << 16); }

// The larger and the smaller of two, and b where one is NaN.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

inline float sum(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}

inline float maximum(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

// e^x for x <= 88 to a few units in the last place, 2^-125 for x below -86; NaN stays NaN.
// x log2(e) = n + r with |r| <= 1/2: 2^n goes into the exponent's bits, 2^r is its Taylor series up to r^DEGREE.
template <int DEGREE = 6>
Floats exponential(Floats x) {
    constexpr float log_2 = 0.693147181f, shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves n in the lowest bits
    x = larger(splat(-86.6f), x) * 1.44269504f;
    Floats shifted = x + shift, r = (x - (shifted - shift)) * log_2;
    float factorial = 1;
    for (int i = 2; i <= DEGREE; i++) factorial *= i;
    Floats series = splat(1 / factorial);
    for (int i = DEGREE; i > 0; i--) series = series * r + 1 / (factorial /= i);
    return series * (Floats)(((Words)shifted << 23) + 0x3F800000u);
}
