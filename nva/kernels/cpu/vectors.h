// Short vectors in the compiler's own terms (GCC and Clang vector extensions), so that one source serves AVX-512, AVX2 and
// NEON. Numbers are stored as T, float or bf16; arithmetic is float32. Read next: matmul.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#if defined(_OPENMP)
inline int thread_id() { return omp_get_thread_num(); }
inline int n_threads() { return omp_get_num_threads(); }
#else
inline int thread_id() { return 0; }
inline int n_threads() { return 1; }
#endif

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

// e^x to a few units in the last place, 2e-38 below -87; NaN stays NaN. x = n log 2 + r with |r| <= log(2) / 2, then the
// Taylor series of e^r, whose next term is below 2^-27, times 2^n by way of the exponent's bits.
inline Floats exponential(Floats x) {
    x = x < -87.0f ? splat(-87.0f) : x;
    x = x > 88.0f ? splat(88.0f) : x;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the lowest bits
    Floats shifted = x * 1.44269504f + shift, n = shifted - shift;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;  // log 2 in two parts, the first exact in few bits
    Floats y = r * (1.0f / 5040) + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return y * (Floats)(((Words)shifted << 23) + 0x3F800000u);
}
