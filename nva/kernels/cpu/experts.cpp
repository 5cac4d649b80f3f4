// Each token of x [T, H] through the likeliest of E experts, which are gated MLPs of J, weighted and summed.
// The law is that of matmul.h: what a token gets depends on its own row alone, to the bit. Which experts are needed is
// found here, so that nothing outside depends on it, and the weights of the others are never read.
#include "gate.h"
#include "matmul.h"
#include "routing.h"
#include "threads.h"

constexpr int64_t TOKENS = 4;  // of a piece, where each is handled alone

struct Block {  // rows [start, end) of one expert
    int64_t expert, start, end;
};

// Every expert's rows, as many at a time as stay in a core's cache.
static std::vector<Block> blocks_of(const Routes& routes, int64_t most) {
    std::vector<Block> blocks;
    int64_t start = 0;
    for (size_t expert = 0; expert < routes.ends.size(); start = routes.ends[expert++]) {
        int64_t n_rows = routes.ends[expert] - start, n_blocks = ceil_div(n_rows, most);
        for (int64_t i = 0; i < n_blocks; i++)
            blocks.push_back({(int64_t)expert, start + n_rows * i / n_blocks, start + n_rows * (i + 1) / n_blocks});
    }
    return blocks;
}

// out [rows, N] = rows a [.., K] times the transpose of their own expert's weight [N, K]. An item is a (block, panel).
template <typename T>
static void multiply_each(const std::vector<Block>& blocks, const T* a, int64_t a_stride, const T* weights, T* out,
                          int64_t N, int64_t K) {
    int64_t n_panels = ceil_div(N, WIDTH), n_items = blocks.size() * n_panels;
    parallel(n_items, panels_at_once<T>(1, K), [&](int64_t at, int64_t end, int) {
        while (at < end) {
            const Block& block = blocks[at / n_panels];
            int64_t p = at % n_panels, p_end = std::min(p + end - at, n_panels);
            multiply_into(out + block.start * N, N, a + block.start * a_stride, a_stride, block.end - block.start,
                          weights + block.expert * n_panels * panel_size<T>(K), K, p * WIDTH, p_end * WIDTH);
            at += p_end - p;
        }
    });
}

// The rows' tokens, in as many numbers as products take, which is pairs.
template <typename T>
static void gather(const Routes& routes, const T* x, T* gathered, int64_t stride, int64_t H) {
    parallel_each(routes.tokens.size(), TOKENS, [&](int64_t row) {
        std::memcpy(gathered + row * stride, x + routes.tokens[row] * H, H * sizeof(T));
        std::memset((void*)(gathered + row * stride + H), 0, (stride - H) * sizeof(T));
    });
}

// In place: of each row's 2 J numbers the first J become the gated ones, and then comes a zero for the last pair.
template <typename T>
static void gate_in_place(T* inner, int64_t n_rows, int64_t J) {
    parallel_each(n_rows, TOKENS, [&](int64_t row) {
        gate_row<silu>(inner + row * 2 * J, inner + row * 2 * J, J);
        inner[row * 2 * J + J] = T{};
    });
}

// One token's sum over its experts, the likeliest first; zero for padding.
template <typename T>
static void add_up(const Routes& routes, int64_t token, const T* outputs, T* out, int64_t H) {
    const int64_t* rows = &routes.rows[token * routes.n_active];
    const float* weights = &routes.weights[token * routes.n_active];
    for (int64_t h = 0; h < H; h += LANES) {
        int n = std::min<int64_t>(LANES, H - h);
        Floats total{};
        for (int64_t i = 0; i < routes.n_active && rows[i] >= 0; i++)
            total += load(outputs + rows[i] * H + h, n) * weights[i];
        store(out + h, total, n);
    }
}

template <typename T>
static void moe(const T* x, const T* logits, const T* gate_up, const T* down, const bool* is_padding, T* gathered,
                T* inner, T* out, int64_t n_tokens, int64_t H, int64_t J, int64_t E, int64_t n_active, bool normalize) {
    int64_t stride = ceil_div(H, PAIR<T>) * PAIR<T>;
    Routes routes(n_tokens, n_active);
    parallel_each(n_tokens, TOKENS, [&](int64_t t) {
        route(logits + t * E, E, normalize, n_active, &routes.experts[t * n_active], &routes.weights[t * n_active]);
    });
    group(routes, is_padding, n_tokens, E);
    gather(routes, x, gathered, stride, H);
    multiply_each(blocks_of(routes, rows_at_once<T>(H)), gathered, stride, gate_up, inner, 2 * J, H);
    gate_in_place(inner, routes.tokens.size(), J);
    // Nobody needs what was gathered any more.
    multiply_each(blocks_of(routes, rows_at_once<T>(J)), inner, 2 * J, down, gathered, H, J);
    parallel_each(n_tokens, TOKENS, [&](int64_t t) { add_up(routes, t, gathered, out + t * H, H); });
}

#define EXPORT(T, name)                                                                                              \
    extern "C" void moe_##name(const T* x, const T* logits, const T* gate_up, const T* down, const bool* is_padding, \
                               T* gathered, T* inner, T* out, int64_t n_tokens, int64_t H, int64_t J, int64_t E,     \
                               int64_t n_active, bool normalize) {                                                   \
        moe(x, logits, gate_up, down, is_padding, gathered, inner, out, n_tokens, H, J, E, n_active, normalize);     \
    }
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
#undef EXPORT
