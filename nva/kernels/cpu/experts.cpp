// Each token of x [T, H] through the likeliest of E experts, which are gated MLPs of J, weighted and summed.
// The law is that of matmul.h: what a token gets depends on its own row alone, to the bit. Which experts are needed is
// found here, so that nothing outside depends on it, and the weights of the others are never read.
#include "gate.h"
#include "matmul.h"
#include "routing.h"

constexpr int64_t READING = 8;  // rows that a core computes while it reads their weights from memory, about

struct Block {  // rows [start, end) of one expert
    int64_t expert, start, end;
    int64_t work() const { return end - start + READING; }  // for each panel
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

// out [rows, N] = rows a [.., K] times the transpose of their own expert's weight [N, K]. Each thread takes a run of
// (block, panel) that is about as much work as the others', and waits for them.
template <typename T>
static void multiply_each(const std::vector<Block>& blocks, const T* a, int64_t a_stride, const T* weights, T* out,
                          int64_t N, int64_t K) {
    int64_t n_panels = ceil_div(N, WIDTH), all = 0;
    for (const Block& block : blocks) all += block.work() * n_panels;
    int64_t from = all * thread_id() / n_threads(), to = all * (thread_id() + 1) / n_threads();
    for (const Block& block : blocks) {
        auto panel_at = [&](int64_t done) {
            return std::min(std::max<int64_t>(ceil_div(done, block.work()), 0), n_panels);
        };
        int64_t p = panel_at(from), p_end = panel_at(to);
        if (p < p_end)
            multiply_into(out + block.start * N, N, a + block.start * a_stride, a_stride, block.end - block.start,
                          weights + block.expert * n_panels * panel_size<T>(K), K, p * WIDTH, p_end * WIDTH);
        from -= block.work() * n_panels, to -= block.work() * n_panels;
    }
#pragma omp barrier
}

// The rows' tokens, in as many numbers as products take, which is pairs.
template <typename T>
static void gather(const Routes& routes, const T* x, T* gathered, int64_t stride, int64_t H) {
#pragma omp for
    for (int64_t row = 0; row < (int64_t)routes.tokens.size(); row++) {
        std::memcpy(gathered + row * stride, x + routes.tokens[row] * H, H * sizeof(T));
        std::memset((void*)(gathered + row * stride + H), 0, (stride - H) * sizeof(T));
    }
}

// In place: of each row's 2 J numbers the first J become the gated ones, and then comes a zero for the last pair.
template <typename T>
static void gate_in_place(T* inner, int64_t n_rows, int64_t J) {
#pragma omp for
    for (int64_t row = 0; row < n_rows; row++) {
        gate_row<silu>(inner + row * 2 * J, inner + row * 2 * J, J);
        inner[row * 2 * J + J] = T{};
    }
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
    std::vector<Block> wide, narrow;
#pragma omp parallel
    {
#pragma omp for
        for (int64_t t = 0; t < n_tokens; t++)
            route(logits + t * E, E, normalize, n_active, &routes.experts[t * n_active], &routes.weights[t * n_active]);
#pragma omp single
        {
            group(routes, is_padding, n_tokens, E);
            wide = blocks_of(routes, rows_at_once<T>(H)), narrow = blocks_of(routes, rows_at_once<T>(J));
        }
        gather(routes, x, gathered, stride, H);
        multiply_each(wide, gathered, stride, gate_up, inner, 2 * J, H);
        gate_in_place(inner, routes.tokens.size(), J);
        multiply_each(narrow, inner, 2 * J, down, gathered, H, J);  // nobody needs what was gathered any more
#pragma omp for
        for (int64_t t = 0; t < n_tokens; t++) add_up(routes, t, gathered, out + t * H, H);
    }
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
