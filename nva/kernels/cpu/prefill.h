// Attention of many queries of a row, as in prefill: bounded by arithmetic, so both products are those of matmul.h.
//
// A row's keys and values are packed into tiles of KEYS positions once, a few heads at a time; then (head, queries) is
// a task. Tiles begin at multiples of KEYS, so a result depends neither on the chunk nor on the batch that
// its query came in. Dao et al. 2022 (FlashAttention): scores exist for one tile at a time, sums are rescaled as the
// maximum grows.
#pragma once

#include "attention.h"

constexpr int64_t KEYS = 128;
constexpr int64_t VECTORS = 96;             // queries of a tile, a token's query heads counted each
constexpr int64_t PACKED_BYTES = 32 << 20;  // of packed keys and values at a time, where one head isn't more

struct Chunk {
    int64_t row, token, n;          // n queries from packed token `token` on
    int64_t position, first_seen;   // of the first query; what it sees is the first that any sees
    int64_t n_tiles, tiles_before;  // tiles of KEYS from the one that holds first_seen on; those of chunks before
    int64_t first_tile() const { return first_seen / KEYS * KEYS; }
};

// How the keys and values of a tile are packed: keys as panels of W = K, then values as panels of W = V^T.
template <typename T>
struct Shape {
    int64_t D;
    int64_t k_panel = panel_size<T>(D), n_k_panels = KEYS / WIDTH, k_size = k_panel * n_k_panels;
    int64_t v_panel = panel_size<T>(KEYS), n_v_panels = ceil_div(D, WIDTH), size = k_size + v_panel * n_v_panels;
};

// Positions that the row doesn't own, and those that none of its queries sees, become zeros.
template <typename T>
void pack_tile(const Cache& cache, const Rows& rows, const Chunk& chunk, int64_t tile, int64_t head, T* packed) {
    Shape<T> shape{cache.D};
    int64_t D = cache.D, start = chunk.first_tile() + tile * KEYS;
    int64_t end = std::min(start + KEYS, chunk.position + chunk.n);
    std::memset((void*)packed, 0, shape.size * sizeof(T));
    for (int64_t at = std::max(start, chunk.first_seen); at < end; at++) {
        int64_t i = at - start, slot = slot_of(rows, chunk.row, at, cache.block_size);
        Key<T> k = key_of<T>(cache, slot, head);
        const T* v = (const T*)cache.v + (slot * cache.n_heads + head) * D;
        T* column = packed + i / WIDTH * shape.k_panel + i % WIDTH * PAIR<T>;
        T* row = packed + shape.k_size + i / PAIR<T> * WIDTH * PAIR<T> + i % PAIR<T>;
        for (int64_t d = 0; d < D / PAIR<T>; d++) std::memcpy(column + d * WIDTH * PAIR<T>, k.at + d * k.step, 4);
        for (int64_t d = 0; d < D; d += WIDTH, row += shape.v_panel)
            for (int64_t j = 0; j < std::min<int64_t>(WIDTH, D - d); j++) row[j * PAIR<T>] = v[d + j];
    }
}

// What a thread keeps of a tile of queries: [VECTORS] rows each, or one token's heads if these are more.
template <typename T>
struct Workspace {
    int64_t o_stride;
    std::vector<T> q, weights;                            // [.., D], [.., KEYS]
    std::vector<float> scores, out, largest, sum, older;  // [.., KEYS], [.., o_stride]
    Workspace(int64_t n, int64_t D)
        : o_stride(ceil_div(D, WIDTH) * WIDTH),
          q(n * D),
          weights(n * KEYS),
          scores(n * KEYS),
          out(n * o_stride),
          largest(n),
          sum(n),
          older(n) {}
};

// Online softmax of a row of scores [KEYS], of which [from, to) are seen: they become exp(score - max), in T. Updates the
// row's running max and sum, and `older`, the factor for earlier sums.
template <typename T>
void softmax_update(Workspace<T>& work, int64_t row, int64_t from, int64_t to) {
    float* scores = &work.scores[row * KEYS];
    T* weights = &work.weights[row * KEYS];
    work.older[row] = 1;
    if (from >= to) return (void)std::memset((void*)weights, 0, KEYS * sizeof(T));
    std::fill(scores, scores + from, NONE);
    std::fill(scores + to, scores + KEYS, NONE);
    Floats tops = load(scores);
    for (int64_t i = LANES; i < KEYS; i += LANES) tops = larger(tops, load(scores + i));
    float before = work.largest[row], largest = std::max(before, maximum(tops));
    Floats total{};
    for (int64_t i = 0; i < KEYS; i += LANES) {
        Floats weight = exponential<DEGREE<T>>(load(scores + i) - largest);
        total += weight;
        store(weights + i, weight);
    }
    work.largest[row] = largest;
    work.older[row] = before == largest ? 1 : std::exp(before - largest);
    work.sum[row] = work.sum[row] * work.older[row] + sum(total);
}

// Queries [start, end) of a chunk, those of the heads that share key-value head `head`, whose packed tiles are given.
template <typename T>
void attend_queries(const Queries<T>& queries, int64_t n_kv_heads, int64_t D, const Chunk& chunk, int64_t start,
                    int64_t end, int64_t head, const T* packed, Workspace<T>& work, T* out) {
    Shape<T> shape{D};
    int64_t n_shared = queries.n_heads / n_kv_heads, n = (end - start) * n_shared;
    for (int64_t i = 0; i < n; i++)
        std::copy_n(
            queries.at + (chunk.token + start + i / n_shared) * queries.stride + (head * n_shared + i % n_shared) * D,
            D, &work.q[i * D]);
    std::fill_n(work.out.data(), n * work.o_stride, 0.0f);
    std::fill_n(work.largest.data(), n, NONE);
    std::fill_n(work.sum.data(), n, 0.0f);
    int64_t seen = first_seen(chunk.position + start, queries.window), own = chunk.position + end - 1;
    for (int64_t tile = (seen - chunk.first_tile()) / KEYS; tile * KEYS + chunk.first_tile() <= own; tile++) {
        int64_t first = chunk.first_tile() + tile * KEYS, n_keys = std::min(KEYS, own + 1 - first);
        const T *k = packed + tile * shape.size, *v = k + shape.k_size;
        multiply(work.q.data(), D, n, k, shape.k_panel, ceil_div(n_keys, WIDTH), D / PAIR<T>,
                 [&](int64_t i, int64_t column, Floats sums) {
                     store(&work.scores[i * KEYS + column], sums * queries.scale);
                 });
        for (int64_t i = 0; i < n; i++) {
            int64_t position = chunk.position + start + i / n_shared;
            softmax_update(work, i, std::max<int64_t>(0, first_seen(position, queries.window) - first),
                       std::min(n_keys, position + 1 - first));
        }
        multiply(work.weights.data(), KEYS, n, v, shape.v_panel, shape.n_v_panels, ceil_div(n_keys, PAIR<T>),
                 [&](int64_t i, int64_t column, Floats sums) {
                     float* sofar = &work.out[i * work.o_stride + column];
                     store(sofar, load(sofar) * work.older[i] + sums);
                 });
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t h = head * n_shared + i % n_shared;
        float sink = queries.sinks ? queries.sinks[h] : NONE, largest = std::max(work.largest[i], sink);
        float share = std::exp(work.largest[i] - largest);
        share /= work.sum[i] * share + std::exp(sink - largest);
        T* result = out + ((chunk.token + start + i / n_shared) * queries.n_heads + h) * D;
        for (int64_t d = 0; d < D; d += LANES)
            store(result + d, load(&work.out[i * work.o_stride + d]) * share, std::min<int64_t>(LANES, D - d));
    }
}

// The tasks of all chunks, latest queries first, as they see most.
struct Span {
    int64_t chunk, start, end;
};

inline std::vector<Span> spans_of(const std::vector<Chunk>& chunks, int64_t n_tokens) {
    std::vector<Span> spans;
    for (int64_t c = 0; c < (int64_t)chunks.size(); c++)
        for (int64_t end = chunks[c].n; end > 0; end -= n_tokens)
            spans.push_back({c, std::max<int64_t>(0, end - n_tokens), end});
    return spans;
}

template <typename T>
void attend_together(const Queries<T>& queries, const Cache& cache, const Rows& rows, const std::vector<Chunk>& chunks,
                     T* out) {
    Shape<T> shape{cache.D};
    int64_t n_shared = queries.n_heads / cache.n_heads, n_tokens = std::max<int64_t>(1, VECTORS / n_shared);
    std::vector<Span> spans = spans_of(chunks, n_tokens);
    int64_t n_tiles = chunks.back().tiles_before + chunks.back().n_tiles, n_spans = spans.size();
    int64_t head_bytes = n_tiles * shape.size * sizeof(T);
    int64_t n_heads = std::clamp<int64_t>(PACKED_BYTES / head_bytes, 1, cache.n_heads);
    std::vector<int64_t> chunk_of;
    for (int64_t c = 0; c < (int64_t)chunks.size(); c++) chunk_of.insert(chunk_of.end(), chunks[c].n_tiles, c);
    T* packed = (T*)std::aligned_alloc(64, ceil_div(n_heads * head_bytes, 64) * 64);
    std::vector<std::unique_ptr<Workspace<T>>> workspaces(n_threads());
    for (int64_t head = 0; head < cache.n_heads; head += n_heads) {
        int64_t n = std::min(n_heads, cache.n_heads - head);
        parallel_each(n * n_tiles, 1, [&](int64_t i) {
            const Chunk& chunk = chunks[chunk_of[i % n_tiles]];
            pack_tile(cache, rows, chunk, i % n_tiles - chunk.tiles_before, head + i / n_tiles,
                      packed + i * shape.size);
        });
        parallel(n * n_spans, 1, [&](int64_t i, int64_t end, int thread) {
            auto& work = workspaces[thread];
            if (!work) work = std::make_unique<Workspace<T>>(n_tokens * n_shared, cache.D);
            for (; i < end; i++) {
                const Span& span = spans[i / n];
                const Chunk& chunk = chunks[span.chunk];
                attend_queries(queries, cache.n_heads, cache.D, chunk, span.start, span.end, head + i % n,
                               packed + (i % n * n_tiles + chunk.tiles_before) * shape.size, *work, out);
            }
        });
    }
    std::free(packed);
}
