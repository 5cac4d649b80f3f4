// Matrix products A [M, K] times the transpose of W [N, K], where W is packed once into panels of WIDTH columns:
//
//     panel[k / PAIR][column][k % PAIR]        PAIR is 2 for bf16, what dot-product instructions take at a time; else 1
//
// The law: an element of the product is one chain of float32 sums over ascending k, so its bits don't depend on the
// other rows of A, on the tile it falls into, or on the number of threads. Read next: linear.cpp, then attention.cpp.
#pragma once

#include "vectors.h"

constexpr int WIDTH = 2 * LANES;

template <typename T>
constexpr int PAIR = sizeof(T) == 2 ? 2 : 1;

// Numbers in a panel of K rows.
template <typename T>
constexpr int64_t panel_size(int64_t K) {
    return ceil_div(K, PAIR<T>) * PAIR<T> * WIDTH;
}

// Rows w [n, K] of a matrix as a panel; missing columns and an odd last k are zero.
template <typename T>
void pack_panel(T* panel, const T* w, int64_t stride, int64_t n, int64_t K) {
    if (n < WIDTH || K % PAIR<T>) std::memset((void*)panel, 0, panel_size<T>(K) * sizeof(T));
    for (int64_t column = 0; column < n; column++)
        for (int64_t k = 0; k < K; k++)
            panel[(k / PAIR<T> * WIDTH + column) * PAIR<T> + k % PAIR<T>] = w[column * stride + k];
}

// PAIR numbers of a row of A in every lane.
template <typename T>
Words broadcast(const T* a) {
    uint32_t bits;
    std::memcpy(&bits, a, sizeof bits);
    return Words{} + bits;
}

inline Floats multiply_add(Floats sum, Words a, Words w, const float*) { return sum + (Floats)a * (Floats)w; }
inline Floats multiply_add(Floats sum, Words a, Words w, const bf16*) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)w);
#else
    sum = sum + (Floats)(a << 16) * (Floats)(w << 16);
    return sum + (Floats)(a & 0xFFFF0000u) * (Floats)(w & 0xFFFF0000u);
#endif
}

#if defined(__AVX512BF16__)
// [a0 b0 a1 b1 ...]: the numbers of two rows as pairs, the first LANES of them and the rest.
inline Words interleaved(Words a, Words b, bool is_rest) {
    alignas(64) static constexpr uint16_t FIRST[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    __m512i index = _mm512_add_epi16(_mm512_load_si512(FIRST), _mm512_set1_epi16(is_rest ? 16 : 0));
    return (Words)_mm512_permutex2var_epi16((__m512i)a, index, (__m512i)b);
}
#endif

constexpr int PREFETCH_ROWS = 4;          // up to this many rows the loop is memory-bound:
constexpr int64_t PREFETCH_BYTES = 2048;  // prefetch weights further ahead than the hardware does

// M rows of A times P panels `panel_stride` apart, over n_steps PAIRs. finish(row, column, sums) takes each vector.
template <int M, int P, typename T, typename Finish>
void tile(const T* a, int64_t a_stride, const T* panel, int64_t panel_stride, int64_t n_steps, const Finish& finish) {
    Floats sums[M][2 * P] = {};
    for (int64_t step = 0; step < n_steps; step++) {
        Words w[2 * P];
#pragma GCC unroll 4
        for (int j = 0; j < 2 * P; j++)
            std::memcpy(&w[j], panel + j / 2 * panel_stride + (step * 2 + j % 2) * LANES * PAIR<T>, sizeof w[j]);
        if constexpr (M <= PREFETCH_ROWS && P == 2)
            for (int j = 0; j < 2 * P; j++)
                __builtin_prefetch((const char*)(panel + j / 2 * panel_stride + (step * 2 + j % 2) * LANES * PAIR<T>) +
                                       PREFETCH_BYTES,
                                   0, 2);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            Words pair = broadcast(a + i * a_stride + step * PAIR<T>);
#pragma GCC unroll 4
            for (int j = 0; j < 2 * P; j++) sums[i][j] = multiply_add(sums[i][j], pair, w[j], panel);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 2 * P; j++) finish(i, j * LANES, sums[i][j]);
}

// The same for m rows, at most M.
template <int M, int P, typename T, typename Finish>
void tile_of(int64_t m, const T* a, int64_t a_stride, const T* panel, int64_t panel_stride, int64_t n_steps,
             const Finish& finish) {
    if (m == M) tile<M, P>(a, a_stride, panel, panel_stride, n_steps, finish);
    else if constexpr (M > 1) tile_of<M - 1, P>(m, a, a_stride, panel, panel_stride, n_steps, finish);
}

// n_rows times n_panels, in tiles of at most M rows and P panels.
template <int M, int P, typename T, typename Finish>
void multiply_in(const T* a, int64_t a_stride, int64_t n_rows, const T* panels, int64_t panel_stride, int64_t n_panels,
                 int64_t n_steps, const Finish& finish) {
    int64_t n_tiles = ceil_div(n_rows, M);
    for (int64_t p = 0; p < n_panels; p += P)
        for (int64_t t = 0; t < n_tiles; t++) {
            int64_t start = n_rows * t / n_tiles, m = n_rows * (t + 1) / n_tiles - start;
            auto put = [&](int i, int column, Floats sums) { finish(start + i, p * WIDTH + column, sums); };
            const T *rows = a + start * a_stride, *panel = panels + p * panel_stride;
            if (p + P <= n_panels) tile_of<M, P>(m, rows, a_stride, panel, panel_stride, n_steps, put);
            else tile_of<M, 1>(m, rows, a_stride, panel, panel_stride, n_steps, put);
        }
}

// n_rows times n_panels. finish(row, column, sums) gets rows and columns of the whole product.
template <typename T, typename Finish>
void multiply(const T* a, int64_t a_stride, int64_t n_rows, const T* panels, int64_t panel_stride, int64_t n_panels,
              int64_t n_steps, const Finish& finish) {
    // A tile's sums fill the registers: 32 of them, or AVX2's 16. While few rows meet weights from memory, tall tiles
    // read each panel once, where wide ones would wait for memory first and compute on what is in the cache after.
    constexpr int P = LANES == 8 ? 1 : 2;
    if (P == 2 && n_rows > 6 && n_rows <= 16)
        multiply_in<8, 1>(a, a_stride, n_rows, panels, panel_stride, n_panels, n_steps, finish);
    else multiply_in<6, P>(a, a_stride, n_rows, panels, panel_stride, n_panels, n_steps, finish);
}

// Rows of A worked on at a time: they stay in a core's cache for all panels.
template <typename T>
int64_t rows_at_once(int64_t K) {
    constexpr int64_t ROW_BYTES = 512 << 10;
    return std::max<int64_t>(ROW_BYTES / (K * sizeof(T)), 6);
}

// Panels that a thread computes at a time, for some rows of A: some 10 us of work, and two panels at least, since tiles
// are that wide.
template <typename T>
int64_t panels_at_once(int64_t n_rows, int64_t K) {
    constexpr int64_t PIECE_BYTES = 128 << 10, ROWS_PER_READ = 16;  // rows that take as long as reading the panel
    int64_t bytes = panel_size<T>(K) * sizeof(T) * ceil_div(n_rows, ROWS_PER_READ);
    return std::max<int64_t>(PIECE_BYTES / std::max<int64_t>(bytes, 1) / 2 * 2, 2);
}

// The product's columns [n, n_end), n a panel's first, plus bias if there is one, into out [n_rows, N].
template <typename T>
void multiply_into(T* out, int64_t N, const T* a, int64_t a_stride, int64_t n_rows, const T* panels, int64_t K,
                   int64_t n, int64_t n_end, const T* bias = nullptr) {
    multiply(a, a_stride, n_rows, panels + n / WIDTH * panel_size<T>(K), panel_size<T>(K), ceil_div(n_end - n, WIDTH),
             ceil_div(K, PAIR<T>), [&](int64_t row, int64_t column, Floats sums) {
                 int64_t left = N - n - column;
                 if (left <= 0) return;
                 int count = left < LANES ? left : LANES;
                 if (bias) sums += load(bias + n + column, count);
                 store(out + row * N + n + column, sums, count);
             });
}
