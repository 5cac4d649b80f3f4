// Attention of single queries, as in decoding: bounded by how fast the cache is read, so each key and value is read
// once for all query heads that share it, and the next ones are fetched meanwhile.
//
// A context is cut into parts at multiples of PART positions, whatever else is in the batch, and (query, part) is the
// unit of work: one long row keeps all cores busy, ragged rows balance, and a row's result never depends on its batch
// mates. Online softmax: Milakov and Gimelshein 2018; merging parts: Dao et al. 2022 (FlashAttention).
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
    const T *k[PIECE] = {}, *v[PIECE] = {};
    int n = 0;
};

template <typename T>
Piece<T> piece_at(const Cache& cache, const Rows& rows, const Part& part, int64_t start) {
    Piece<T> piece;
    for (int64_t at = start; at < part.end && piece.n < PIECE;) {
        int64_t slot = slot_of(rows, part.row, at, cache.block_size);
        int64_t in_block = cache.block_size - at % cache.block_size;
        for (; in_block > 0 && at < part.end && piece.n < PIECE; in_block--, at++, slot++, piece.n++) {
            piece.k[piece.n] = (const T*)cache.k + slot * cache.n_heads * cache.D;
            piece.v[piece.n] = (const T*)cache.v + slot * cache.n_heads * cache.D;
        }
    }
    for (int i = piece.n; i < PIECE; i++) piece.k[i] = piece.k[0], piece.v[i] = piece.v[0];  // scored, then forgotten
    return piece;
}

// Scores q k of G query heads [G, D] for four keys [D], into scores [G, PIECE].
template <int G, typename T>
ALWAYS_INLINE void score(const T* q, const T* const* k, int64_t offset, int64_t D, float* scores) {
    Floats sums[G][4] = {};
    int64_t d = 0;
    for (; d + LANES * PAIR<T> <= D; d += LANES * PAIR<T>)
        for (int t = 0; t < 4; t++) {
            Words keys, queries;
            std::memcpy(&keys, k[t] + offset + d, sizeof keys);
            for (int g = 0; g < G; g++) {
                std::memcpy(&queries, q + g * D + d, sizeof queries);
                sums[g][t] = multiply_add(sums[g][t], queries, keys, q);
            }
        }
    for (; d < D; d += LANES)
        for (int t = 0, n = std::min<int64_t>(LANES, D - d); t < 4; t++)
            for (int g = 0; g < G; g++) sums[g][t] += load(q + g * D + d, n) * load(k[t] + offset + d, n);
    for (int g = 0; g < G; g++) sums_of_four(sums[g], scores + g * PIECE);
}

// Scores of a piece become weights; the state's largest and sum are updated. Returns what older sums are worth now.
template <typename T>
float soften(float* scores, int n, float scale, float& largest, float& total) {
    std::fill(scores + n, scores + PIECE, NONE);
    Floats low = load(scores) * scale, high = load(scores + LANES) * scale;
    float before = largest;
    largest = std::max(before, maximum(larger(low, high)));
    low = exponential<DEGREE<T>>(low - largest), high = exponential<DEGREE<T>>(high - largest);
    store(scores, low);
    store(scores + LANES, high);
    float older = before == largest ? 1 : std::exp(before - largest);
    total = total * older + sum(low + high);
    return older;
}

// values [G, stride] = values * older + weights [G, PIECE] times the piece's values [n, D]: C vectors from number d on.
template <int G, int C, typename T>
ALWAYS_INLINE void weigh_columns(const float* weights, const float* older, const T* const* v, int64_t offset, int n,
                                 int64_t d, int width, float* values, int64_t stride) {
    Floats sums[G][C];
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++) sums[g][c] = load(values + g * stride + d + c * LANES, width) * older[g];
    for (int t = 0; t < n; t++)
        for (int c = 0; c < C; c++) {
            Floats value = load(v[t] + offset + d + c * LANES, width);
            for (int g = 0; g < G; g++) sums[g][c] += weights[g * PIECE + t] * value;
        }
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++) store(values + g * stride + d + c * LANES, sums[g][c], width);
}

// The same for as many of the D numbers as a processor's products of pairs can take; returns how many.
template <int G, typename T>
int64_t weigh_pairs(const float*, const float*, const T* const*, int64_t, int, int64_t, float*, int64_t) {
    return 0;
}

#if defined(__AVX512BF16__)
// Two positions at a time; weights are rounded to bf16, as in prefill.
template <int G>
ALWAYS_INLINE int64_t weigh_pairs(const float* weights, const float* older, const bf16* const* v, int64_t offset, int n,
                                  int64_t D, float* values, int64_t stride) {
    constexpr int C = G <= 3 ? 4 : 2;
    bf16 narrow[G * PIECE];
    for (int i = 0; i < G * PIECE; i += LANES) store(narrow + i, load(weights + i));
    int64_t d = 0;
    for (; d + C * LANES <= D; d += C * LANES) {
        Floats sums[G][C];
        for (int g = 0; g < G; g++)
            for (int c = 0; c < C; c++) sums[g][c] = load(values + g * stride + d + c * LANES) * older[g];
        for (int t = 0; t < n; t += 2)
            for (int c = 0; c < C; c += 2) {
                Words even, odd{};
                std::memcpy(&even, v[t] + offset + d + c * LANES, sizeof even);
                if (t + 1 < n) std::memcpy(&odd, v[t + 1] + offset + d + c * LANES, sizeof odd);
                Words first = interleaved(even, odd, false), rest = interleaved(even, odd, true);
                for (int g = 0; g < G; g++) {
                    Words pair = broadcast(narrow + g * PIECE + t);
                    sums[g][c] = multiply_add(sums[g][c], pair, first, narrow);
                    sums[g][c + 1] = multiply_add(sums[g][c + 1], pair, rest, narrow);
                }
            }
        for (int g = 0; g < G; g++)
            for (int c = 0; c < C; c++) store(values + g * stride + d + c * LANES, sums[g][c]);
    }
    return d;
}
#endif

// The same for all D numbers, with as many sums at a time as hide the latency of one.
template <int G, typename T>
ALWAYS_INLINE void weigh(const float* weights, const float* older, const T* const* v, int64_t offset, int n, int64_t D,
                         float* values, int64_t stride) {
    constexpr int C = G <= 2 ? 4 : G <= 4 ? 2 : 1;
    int64_t d = weigh_pairs<G>(weights, older, v, offset, n, D, values, stride);
    for (; d + C * LANES <= D; d += C * LANES)
        weigh_columns<G, C>(weights, older, v, offset, n, d, LANES, values, stride);
    for (; d < D; d += LANES)
        weigh_columns<G, 1>(weights, older, v, offset, n, d, std::min<int64_t>(LANES, D - d), values, stride);
}

// Memory is read while there is arithmetic to do on what was read before: a piece's values come in while its keys are
// scored, the next one's keys while its values are weighed, both in the order of their addresses.
template <typename T>
ALWAYS_INLINE void fetch(const T* at, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(at + i, 0, 2);
}

// The states [n_heads, stride] of a part's query, for key-value heads [head, head_end): values [D], largest, sum.
// G query heads at a time meet a key or value; G divides the number that share it.
template <int G, typename T>
void attend_part(const Queries<T>& queries, const Cache& cache, const Rows& rows, const Part& part, int64_t head,
                 int64_t head_end, float* states, int64_t stride) {
    int64_t D = cache.D, n_shared = queries.n_heads / cache.n_heads, first = head * n_shared, end = head_end * n_shared;
    const T* q = queries.at + part.token * queries.stride;
    for (int64_t h = first; h < end; h++) {
        std::fill_n(states + h * stride, D, 0.0f);
        states[h * stride + D] = NONE, states[h * stride + D + 1] = 0;
    }
    std::vector<float> scores((end - first) * PIECE);
    Piece<T> next = piece_at<T>(cache, rows, part, part.start);
    for (int64_t at = part.start; at < part.end; at += PIECE) {
        Piece<T> piece = next;
        next = piece_at<T>(cache, rows, part, at + PIECE);
        for (int t = 0; t < piece.n; t += 4) {
            float* out = scores.data() + t;
            for (int64_t h = head, offset = head * D; h < head_end; h++, offset += D) {
                for (int64_t i = h * n_shared; i < (h + 1) * n_shared; i += G, out += G * PIECE)
                    score<G>(q + i * D, piece.k + t, offset, D, out);
                for (int j = 0; j < 4; j++) fetch(piece.v[t + j] + offset, D);
            }
        }
        float *weights = scores.data(), *state = states + first * stride, older[G];
        for (int64_t h = head, n = head_end - head; h < head_end; h++) {
            for (int64_t t = next.n * (h - head) / n; t < next.n * (h + 1 - head) / n; t++)
                fetch(next.k[t] + head * D, n * D);
            for (int64_t i = 0; i < n_shared; i += G, weights += G * PIECE, state += G * stride) {
                for (int g = 0; g < G; g++) {
                    float* total = state + g * stride + D;
                    older[g] = soften<T>(weights + g * PIECE, piece.n, queries.scale, total[0], total[1]);
                }
                weigh<G>(weights, older, piece.v, h * D, piece.n, D, state, stride);
            }
        }
    }
}

template <typename T, int G = 8>
void attend_part_by(const Queries<T>& queries, const Cache& cache, const Rows& rows, const Part& part, int64_t head,
                    int64_t head_end, float* states, int64_t stride) {
    if (queries.n_heads / cache.n_heads % G == 0)
        attend_part<G>(queries, cache, rows, part, head, head_end, states, stride);
    else if constexpr (G > 1) attend_part_by<T, G - 1>(queries, cache, rows, part, head, head_end, states, stride);
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
            attend_part_by(queries, cache, rows, parts[p], cache.n_heads * split / n_splits,
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
