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

// Keys of some positions side by side, for the first head.
template <typename T>
struct Group {
    const T* at;
    int64_t width;
};

// Whole groups, and the values of their positions for the first head. The part has the positions [first, end) of it.
template <typename T>
struct Piece {
    Group<T> groups[PIECE];
    const T* v[PIECE];
    int64_t start;
    int n_groups = 0, n = 0, first = 0, end = 0;
};

template <typename T>
Piece<T> piece_at(const Cache& cache, const Rows& rows, const Part& part, int64_t at) {
    Piece<T> piece;
    int64_t size = cache.n_heads * cache.D, offset = at % cache.block_size;
    at = piece.start = at - offset + cache.group_start(offset);
    while (at < part.end) {
        int64_t slot = slot_of(rows, part.row, at, cache.block_size), width = cache.group_width(at % cache.block_size);
        if (piece.n + width > PIECE) break;
        piece.groups[piece.n_groups++] = {(const T*)cache.k + slot * size, width};
        for (int i = 0; i < width; i++) piece.v[piece.n++] = (const T*)cache.v + (slot + i) * size;
        at += width;
    }
    piece.first = std::max<int64_t>(0, part.start - piece.start);
    piece.end = std::min<int64_t>(piece.n, part.end - piece.start);
    return piece;
}

// Memory is read while there is arithmetic to do on what was read before: a piece's values come in while its keys are
// scored, the next one's keys while its values are weighed, both in the order of their addresses.
template <typename T>
ALWAYS_INLINE void fetch(const T* at, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(at + i, 0, 2);
}

// Scores q k of G query heads [G, D] for the keys that two groups have for one head, into scores [G, PIECE]. The values
// of their positions are fetched on the way, if `v` says where they are.
template <int G, bool IS_FULL, typename T>
ALWAYS_INLINE void score(const T* q, Group<T> one, Group<T> two, int64_t head, int64_t D, const T* const* v,
                         float* scores) {
    Floats sums[G][2] = {};
    const T *k = one.at + head * one.width * D, *l = two.at + head * two.width * D;
    int64_t n = one.width + two.width;
    for (int64_t d = 0, t = 0; d < D; d += PAIR<T>) {
        Words keys[2] = {};
        std::memcpy(&keys[0], k + d * one.width, IS_FULL ? sizeof keys[0] : 4 * one.width);
        std::memcpy(&keys[1], l + d * two.width, IS_FULL ? sizeof keys[1] : 4 * two.width);
        for (int g = 0; g < G; g++) {
            Words pair = broadcast(q + g * D + d);
            for (int i = 0; i < 2; i++) sums[g][i] = multiply_add(sums[g][i], pair, keys[i], q);
        }
        for (; v && t * D < n * d; t++) fetch(v[t] + head * D, D);
    }
    for (int g = 0; g < G; g++) {
        store(scores + g * PIECE, sums[g][0], one.width);
        store(scores + g * PIECE + one.width, sums[g][1], two.width);
    }
}

// Scores of a piece become weights; the state's largest and sum are updated. Returns what older sums are worth now.
template <typename T>
float soften(float* scores, int first, int end, float scale, float& largest, float& total) {
    std::fill(scores, scores + first, NONE);
    std::fill(scores + end, scores + PIECE, NONE);
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

// Scores of G query heads for all keys that a piece has for one head, into scores [G, PIECE].
template <int G, typename T>
void score_piece(const T* q, const Piece<T>& piece, int64_t head, int64_t D, bool fetches, float* scores) {
    const T* const* v = fetches ? piece.v : nullptr;
    for (int i = 0; i < piece.n_groups; i += 2) {
        Group<T> one = piece.groups[i], two = i + 1 < piece.n_groups ? piece.groups[i + 1] : Group<T>{one.at, 0};
        if (one.width == LANES && two.width == LANES) score<G, true>(q, one, two, head, D, v, scores);
        else score<G, false>(q, one, two, head, D, v, scores);
        scores += one.width + two.width;
        if (v) v += one.width + two.width;
    }
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
    float scores[(G + 1) * PIECE], older[G];
    Piece<T> next = piece_at<T>(cache, rows, part, part.start);
    while (next.n) {
        Piece<T> piece = next;
        next = piece_at<T>(cache, rows, part, piece.start + piece.n);
        for (int64_t h = head; h < head_end; h++) {
            for (int64_t i = h * n_shared; i < (h + 1) * n_shared; i += G) {
                score_piece<G>(q + i * D, piece, h, D, i == h * n_shared, scores);
                for (int j = 0; j < next.n_groups && i == h * n_shared; j++)
                    fetch(next.groups[j].at + h * next.groups[j].width * D, next.groups[j].width * D);
                for (int g = 0; g < G; g++) {
                    float* total = states + (i + g) * stride + D;
                    older[g] = soften<T>(scores + g * PIECE, piece.first, piece.end, queries.scale, total[0], total[1]);
                }
                weigh<G>(scores + piece.first, older, piece.v + piece.first, h * D, piece.end - piece.first, D,
                         states + i * stride, stride);
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
