// Attention of single queries, as in decoding: bounded by how fast the cache is read, so each key and value is read once
// for all query heads that share it, and the next ones are fetched meanwhile.
//
// A context is cut into parts at multiples of PART positions, whatever else is in the batch, and (query, part) is the unit
// of work: one long row keeps all cores busy, ragged rows balance, and a row's result never depends on its batch mates.
// Online softmax: Milakov and Gimelshein 2018; merging parts: Dao et al. 2022 (FlashAttention).
#pragma once

#include "attention.h"

constexpr int64_t PART = 256;
constexpr int PIECE = 2 * LANES;  // positions whose scores are held in registers

struct Part {
    int64_t token, row, start, end;  // query and the positions [start, end) that it looks at
};

// Keys and values of a piece, for the first head.
template <typename T>
struct Piece {
    const T *k[PIECE], *v[PIECE];
    int n = 0;
};

template <typename T>
Piece<T> piece_at(const Cache& cache, const Rows& rows, const Part& part, int64_t start) {
    Piece<T> piece;
    for (int64_t at = start; at < part.end && piece.n < PIECE; at++, piece.n++) {
        int64_t offset = slot_of(rows, part.row, at, cache.block_size) * cache.n_heads * cache.D;
        piece.k[piece.n] = (const T*)cache.k + offset;
        piece.v[piece.n] = (const T*)cache.v + offset;
    }
    return piece;
}

// q k for G query heads [G, D] and one key [D].
template <int G, typename T>
void dot(const T* q, const T* k, int64_t D, Floats* sums) {
    int64_t d = 0;
    for (; d + LANES * PAIR<T> <= D; d += LANES * PAIR<T>) {
        Words keys;
        std::memcpy(&keys, k + d, sizeof keys);
        for (int g = 0; g < G; g++) {
            Words queries;
            std::memcpy(&queries, q + g * D + d, sizeof queries);
            sums[g] = multiply_add(sums[g], queries, keys, q);
        }
    }
    for (; d < D; d += LANES) {
        int n = std::min<int64_t>(LANES, D - d);
        for (int g = 0; g < G; g++) sums[g] += load(q + g * D + d, n) * load(k + d, n);
    }
}

// Scores of a piece become weights; the state's largest and sum are updated. Returns what older sums are worth now.
inline float soften(float* scores, int n, float scale, float& largest, float& total) {
    Floats low = load(scores) * scale, high = load(scores + LANES) * scale;
    for (int t = n; t < LANES; t++) low[t] = NONE;
    for (int t = std::max(n, LANES); t < PIECE; t++) high[t - LANES] = NONE;
    float before = largest;
    largest = std::max(before, maximum(low > high ? low : high));
    Floats low_weights = exponential(low - largest), high_weights = exponential(high - largest);
    store(scores, low_weights);
    store(scores + LANES, high_weights);
    float older = exponential(splat(before - largest))[0];
    total = total * older + sum(low_weights + high_weights);
    return older;
}

// values [G, D] = values * older + weights [G, PIECE] times the piece's values [n, D].
template <int G, typename T>
void weigh(const float* weights, const float* older, const T* const* v, int64_t offset, int n, int64_t D, float* values,
           int64_t stride) {
    for (int64_t d = 0; d < D; d += LANES) {
        int width = std::min<int64_t>(LANES, D - d);
        Floats sums[G];
        for (int g = 0; g < G; g++) sums[g] = load(values + g * stride + d, width) * older[g];
        for (int t = 0; t < n; t++) {
            Floats value = load(v[t] + offset + d, width);
            for (int g = 0; g < G; g++) sums[g] += weights[g * PIECE + t] * value;
        }
        for (int g = 0; g < G; g++) store(values + g * stride + d, sums[g], width);
    }
}

// G query heads that share a key-value head take in a piece. states [G, stride]: values [D], largest, sum.
template <int G, typename T>
void attend_piece(const T* q, const Piece<T>& piece, const Piece<T>& next, int64_t offset, int64_t D, float scale,
                  float* states, int64_t stride) {
    float scores[G * PIECE], older[G];
    for (int t = 0; t < piece.n; t++) {
        Floats sums[G] = {};
        dot<G>(q, piece.k[t] + offset, D, sums);
        for (int g = 0; g < G; g++) scores[g * PIECE + t] = sum(sums[g]);
        if (t < next.n)
            for (int64_t d = 0; d < D; d += 64 / sizeof(T)) {
                __builtin_prefetch(next.k[t] + offset + d);
                __builtin_prefetch(next.v[t] + offset + d);
            }
    }
    for (int g = 0; g < G; g++) {
        float* state = states + g * stride;
        older[g] = soften(scores + g * PIECE, piece.n, scale, state[D], state[D + 1]);
    }
    weigh<G>(scores, older, piece.v, offset, piece.n, D, states, stride);
}

template <typename T, int G = 8>
void attend_group(int n_shared, const T* q, const Piece<T>& piece, const Piece<T>& next, int64_t offset, int64_t D,
                  float scale, float* states, int64_t stride) {
    for (; n_shared > G; n_shared -= G, q += G * D, states += G * stride)
        attend_piece<G>(q, piece, next, offset, D, scale, states, stride);
    if (n_shared == G) attend_piece<G>(q, piece, next, offset, D, scale, states, stride);
    else if constexpr (G > 1) attend_group<T, G - 1>(n_shared, q, piece, next, offset, D, scale, states, stride);
}

// The states [n_heads, stride] of a part's query, for key-value heads [head, head_end).
template <typename T>
void attend_part(const Queries<T>& queries, const Cache& cache, const Rows& rows, const Part& part, int64_t head,
                 int64_t head_end, float* states, int64_t stride) {
    int64_t D = cache.D, n_shared = queries.n_heads / cache.n_heads;
    const T* q = queries.at + part.token * queries.stride;
    for (int64_t h = head * n_shared; h < head_end * n_shared; h++) {
        std::fill_n(states + h * stride, D, 0.0f);
        states[h * stride + D] = NONE, states[h * stride + D + 1] = 0;
    }
    Piece<T> piece = piece_at<T>(cache, rows, part, part.start);
    for (int64_t at = part.start; at < part.end; at += PIECE) {
        Piece<T> next = piece_at<T>(cache, rows, part, at + PIECE);
        for (int64_t h = head; h < head_end; h++)
            attend_group(n_shared, q + h * n_shared * D, piece, next, h * D, D, queries.scale,
                         states + h * n_shared * stride, stride);
        piece = next;
    }
}

// The softmax over n parts of one head, whose states lie `step` apart, into out [D].
template <typename T>
void merge(const float* states, int64_t step, int64_t n, const float* sink, int64_t D, T* out) {
    float largest = sink ? *sink : NONE, total = 0;
    for (int64_t i = 0; i < n; i++) largest = std::max(largest, states[i * step + D]);
    std::vector<float> weights(n);
    for (int64_t i = 0; i < n; i++) {
        weights[i] = std::exp(states[i * step + D] - largest);
        total += weights[i] * states[i * step + D + 1];
    }
    if (sink) total += std::exp(*sink - largest);
    for (int64_t d = 0; d < D; d += LANES) {
        int width = std::min<int64_t>(LANES, D - d);
        Floats sums{};
        for (int64_t i = 0; i < n; i++) sums += load(states + i * step + d, width) * weights[i];
        store(out + d, sums / total, width);
    }
}

template <typename T>
void attend_singly(const Queries<T>& queries, const Cache& cache, const Rows& rows, const std::vector<Part>& parts,
                   T* out) {
    int64_t n_parts = parts.size(), stride = ceil_div(cache.D + 2, LANES) * LANES, n_heads = queries.n_heads;
    std::vector<float> states(n_parts * n_heads * stride);
#pragma omp parallel
    {
        int64_t n_splits = std::min<int64_t>(cache.n_heads, ceil_div(4 * n_threads(), n_parts));
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < n_parts * n_splits; i++) {
            int64_t p = i / n_splits, split = i % n_splits;
            attend_part(queries, cache, rows, parts[p], cache.n_heads * split / n_splits,
                        cache.n_heads * (split + 1) / n_splits, states.data() + p * n_heads * stride, stride);
        }
#pragma omp for schedule(static)
        for (int64_t p = 0; p < n_parts; p++) {
            if (p && parts[p - 1].token == parts[p].token) continue;
            int64_t n = 1;
            while (p + n < n_parts && parts[p + n].token == parts[p].token) n++;
            for (int64_t h = 0; h < n_heads; h++)
                merge(&states[(p * n_heads + h) * stride], n_heads * stride, n,
                      queries.sinks ? queries.sinks + h : nullptr, cache.D,
                      out + (parts[p].token * n_heads + h) * cache.D);
        }
    }
}
