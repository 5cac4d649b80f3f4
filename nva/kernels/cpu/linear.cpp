// out [M, N] = x [M, K] times the transpose of a weight [N, K] that was packed into panels, plus bias.
// The law is that of matmul.h: a row of the result depends on its own row of x alone, to the bit.
#include "matmul.h"
#include "threads.h"

template <typename T>
static void pack(T* packed, const T* w, int64_t N, int64_t K) {
    parallel_each(ceil_div(N, WIDTH), panels_at_once<T>(1, K), [&](int64_t p) {
        int64_t n = p * WIDTH;
        pack_panel(packed + p * panel_size<T>(K), w + n * K, K, std::min<int64_t>(N - n, WIDTH), K);
    });
}

template <typename T>
static void linear(const T* x, const T* panels, const T* bias, T* out, int64_t M, int64_t N, int64_t K) {
    if (M == 0) return;
    int64_t n_blocks = ceil_div(M, rows_at_once<T>(K)), n_panels = ceil_div(N, WIDTH);
    // An item is a (block, panel): panels split the work of a decode step, blocks that of a prompt.
    parallel(n_blocks * n_panels, panels_at_once<T>(M / n_blocks, K), [&](int64_t at, int64_t end, int) {
        while (at < end) {
            int64_t b = at / n_panels, p = at % n_panels, p_end = std::min(p + end - at, n_panels);
            int64_t row = M * b / n_blocks, row_end = M * (b + 1) / n_blocks;
            multiply_into(out + row * N, N, x + row * K, K, row_end - row, panels, K, p * WIDTH, p_end * WIDTH, bias);
            at += p_end - p;
        }
    });
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
