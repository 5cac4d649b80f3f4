// out [M, N] = x [M, K] times the transpose of a weight [N, K] that was packed into panels, plus bias.
// The law is that of matmul.h: a row of the result depends on its own row of x alone, to the bit.
#include "matmul.h"

constexpr int64_t ROW_BYTES = 512 << 10;  // rows of x worked on at a time: they stay in a core's cache for all panels

template <typename T>
static void pack(T* packed, const T* w, int64_t N, int64_t K) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n += WIDTH)
        pack_panel(packed + n / WIDTH * panel_size<T>(K), w + n * K, K, N - n < WIDTH ? N - n : WIDTH, K);
}

template <typename T>
static void block(const T* x, const T* panels, const T* bias, T* out, int64_t rows, int64_t n, int64_t n_end, int64_t N,
                  int64_t K) {
    multiply(x, K, rows, panels + n / WIDTH * panel_size<T>(K), panel_size<T>(K), ceil_div(n_end - n, WIDTH),
             ceil_div(K, PAIR<T>), [&](int64_t row, int64_t column, Floats sums) {
                 int64_t left = N - n - column;
                 if (left <= 0) return;
                 int count = left < LANES ? left : LANES;
                 if (bias) sums += load(bias + n + column, count);
                 store(out + row * N + n + column, sums, count);
             });
}

template <typename T>
static void linear(const T* x, const T* panels, const T* bias, T* out, int64_t M, int64_t N, int64_t K) {
    int64_t most = ROW_BYTES / (K * sizeof(T)), n_blocks = ceil_div(M, most > 6 ? most : 6);
    int64_t n_panels = ceil_div(N, WIDTH);
#pragma omp parallel
    {
        // Each thread takes a run of (block, panel): panels split the work of a decode step, blocks that of a prompt.
        int64_t id = thread_id(), n = n_threads(), n_all = n_blocks * n_panels;
        for (int64_t at = n_all * id / n, end = n_all * (id + 1) / n; at < end;) {
            int64_t b = at / n_panels, p = at % n_panels, p_end = end - at < n_panels - p ? p + end - at : n_panels;
            int64_t row = M * b / n_blocks, row_end = M * (b + 1) / n_blocks;
            block(x + row * K, panels, bias, out + row * N, row_end - row, p * WIDTH, p_end * WIDTH, N, K);
            at += p_end - p;
        }
    }
}

#define EXPORT(T, name)                                                                                     \
    extern "C" void pack_##name(T* packed, const T* w, int64_t N, int64_t K) { pack(packed, w, N, K); }     \
    extern "C" void linear_##name(const T* x, const T* panels, const T* bias, T* out, int64_t M, int64_t N, \
                                  int64_t K) {                                                              \
        linear(x, panels, bias, out, M, N, K);                                                              \
    }
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
#undef EXPORT

extern "C" int64_t panel_width() { return WIDTH; }
