// What happens to each token alone between the matrix products: norms, rotations, the gates.
// The law: one pass over memory, float32 inside, threads only where there is enough to do.
#include "gate.h"
#include "threads.h"

constexpr int64_t FEW = 1 << 13;  // numbers that one thread handles before others could have started

// Rows of `size` numbers that a thread handles at a time.
static int64_t rows_at_once(int64_t size) { return FEW / std::clamp<int64_t>(size, 1, FEW); }

// Rows of length H: `n_inner` side by side, then the next after `stride`.
template <typename T>
static const T* row_at(const T* x, int64_t i, int64_t n_inner, int64_t stride, int64_t H) {
    return x + i / n_inner * stride + i % n_inner * H;
}

template <typename T>
static void norm_row(const T* x, const T* weight, float eps, bool unit_offset, T* out, int64_t H) {
    Floats squares{};
    for (int64_t i = 0; i < H; i += LANES) {
        Floats wide = load(x + i, std::min<int64_t>(LANES, H - i));
        squares += wide * wide;
    }
    float scale = 1 / std::sqrt(sum(squares) / H + eps);
    for (int64_t i = 0; i < H; i += LANES) {
        int n = std::min<int64_t>(LANES, H - i);
        Floats normed = load(x + i, n) * scale, by = load(weight + i, n);
        store(out + i, unit_offset ? normed * (by + 1.0f) : rounded(normed, x) * by, n);
    }
}

template <typename T>
static void rms_norm(const T* x, int64_t n_inner, int64_t stride, const T* weight, float eps, bool unit_offset, T* out,
                     int64_t n_rows, int64_t H) {
    parallel_each(n_rows, rows_at_once(H), [&](int64_t i) {
        norm_row(row_at(x, i, n_inner, stride, H), weight, eps, unit_offset, out + i * H, H);
    });
}

template <typename T>
static void add_rms_norm(const T* x, const T* residual, const T* weight, float eps, bool unit_offset, T* out, T* total,
                         int64_t n_rows, int64_t H) {
    parallel_each(n_rows, rows_at_once(H), [&](int64_t row) {
        for (int64_t i = row * H; i < (row + 1) * H; i += LANES) {
            int n = std::min<int64_t>(LANES, (row + 1) * H - i);
            store(total + i, load(x + i, n) + load(residual + i, n), n);
        }
        norm_row(total + row * H, weight, eps, unit_offset, out + row * H, H);
    });
}

template <Floats (*GATE)(Floats), typename T>
static void gate_rows(const T* x, T* out, int64_t n_rows, int64_t inner) {
    parallel_each(n_rows, rows_at_once(inner),
                  [&](int64_t row) { gate_row<GATE>(x + row * 2 * inner, out + row * inner, inner); });
}

// Heads [n_heads, D] of one token; number i of the first R turns with number i + R / 2.
template <typename T>
static void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t n_heads, int64_t D, int64_t R) {
    for (int64_t h = 0; h < n_heads; h++, x += D, out += D) {
        for (int64_t i = 0, j = R / 2; i < R / 2; i += LANES, j += LANES) {
            int n = std::min<int64_t>(LANES, R / 2 - i);
            Floats low = load(x + i, n), high = load(x + j, n);
            store(out + i, low * load(cos + i, n) - high * load(sin + i, n), n);
            store(out + j, high * load(cos + j, n) + low * load(sin + j, n), n);
        }
        std::memcpy(out + R, x + R, (D - R) * sizeof(T));
    }
}

template <typename T>
static void rotary(const T* q, int64_t q_stride, const T* k, int64_t k_stride, const T* cos, const T* sin, T* q_out,
                   T* k_out, int64_t n_tokens, int64_t n_heads, int64_t n_kv_heads, int64_t D, int64_t R) {
    parallel_each(n_tokens, rows_at_once((n_heads + n_kv_heads) * D), [&](int64_t t) {
        rotate(q + t * q_stride, cos + t * R, sin + t * R, q_out + t * n_heads * D, n_heads, D, R);
        rotate(k + t * k_stride, cos + t * R, sin + t * R, k_out + t * n_kv_heads * D, n_kv_heads, D, R);
    });
}

#define EXPORT(T, name)                                                                                              \
    extern "C" void rms_norm_##name(const T* x, int64_t n_inner, int64_t stride, const T* weight, float eps,         \
                                    bool unit_offset, T* out, int64_t n_rows, int64_t H) {                           \
        rms_norm(x, n_inner, stride, weight, eps, unit_offset, out, n_rows, H);                                      \
    }                                                                                                                \
    extern "C" void add_rms_norm_##name(const T* x, const T* residual, const T* weight, float eps, bool unit_offset, \
                                        T* out, T* total, int64_t n_rows, int64_t H) {                               \
        add_rms_norm(x, residual, weight, eps, unit_offset, out, total, n_rows, H);                                  \
    }                                                                                                                \
    extern "C" void silu_mul_##name(const T* x, T* out, int64_t n_rows, int64_t inner) {                             \
        gate_rows<silu>(x, out, n_rows, inner);                                                                      \
    }                                                                                                                \
    extern "C" void gelu_tanh_mul_##name(const T* x, T* out, int64_t n_rows, int64_t inner) {                        \
        gate_rows<gelu_tanh>(x, out, n_rows, inner);                                                                 \
    }                                                                                                                \
    extern "C" void rotary_##name(const T* q, int64_t q_stride, const T* k, int64_t k_stride, const T* cos,          \
                                  const T* sin, T* q_out, T* k_out, int64_t n_tokens, int64_t n_heads,               \
                                  int64_t n_kv_heads, int64_t D, int64_t R) {                                        \
        rotary(q, q_stride, k, k_stride, cos, sin, q_out, k_out, n_tokens, n_heads, n_kv_heads, D, R);               \
    }
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
#undef EXPORT
