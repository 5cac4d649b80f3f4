// Attention of single queries, as in decoding: bounded by how fast the cache is read, so each key and value is read
// once for all query heads that share it, and for all queries of a shared group, while the next ones are prefetched.
// Online softmax: Milakov and Gimelshein 2018; splits and their merging: Dao et al. 2023 (Flash-Decoding).
#pragma once

#include "tiles.h"

constexpr int ROWS = 6;  // query heads at a time that meet a key or value: their sums fill the registers

// Calls of fetch_some for one key-value head and a few of its query heads.
template <typename T>
int64_t n_calls(int64_t D) {
    return (D + ceil_div(D, 4 * LANES) * TILE) / PAIR<T>;
}

// Scores q k of G query heads for the keys that two groups have for one head, into scores [G, TILE].
template <int G, bool IS_FULL, typename T>
ALWAYS_INLINE void score(const T* const* q, Group<T> one, Group<T> two, int64_t head, int64_t D, Ahead<T>& ahead,
                         float* scores) {
    Floats sums[G][2] = {};
    const T *k = one.at + head * one.width * D, *l = two.at + head * two.width * D;
    for (int64_t d = 0; d < D; d += PAIR<T>) {
        Words keys[2] = {};
        std::memcpy(&keys[0], k + d * one.width, IS_FULL ? sizeof keys[0] : 4 * one.width);
        std::memcpy(&keys[1], l + d * two.width, IS_FULL ? sizeof keys[1] : 4 * two.width);
        for (int g = 0; g < G; g++) {
            Words pair = broadcast(q[g] + d);
            for (int i = 0; i < 2; i++) sums[g][i] = multiply_add(sums[g][i], pair, keys[i], q[g]);
        }
        ahead.fetch_some();
    }
    for (int g = 0; g < G; g++) {
        store(scores + g * TILE, sums[g][0], one.width);
        store(scores + g * TILE + one.width, sums[g][1], two.width);
    }
}

// Scores of G query heads for all keys that a tile has for one head, into scores [G, TILE].
template <int G, typename T>
ALWAYS_INLINE void score_tile(const T* const* q, const Tile<T>& tile, int64_t head, int64_t D, Ahead<T>& ahead,
                               float* scores) {
    for (int i = 0; i < tile.n_groups; i += 2) {
        Group<T> one = tile.groups[i], two = i + 1 < tile.n_groups ? tile.groups[i + 1] : Group<T>{one.at, 0};
        if (one.width == LANES && two.width == LANES) score<G, true>(q, one, two, head, D, ahead, scores);
        else score<G, false>(q, one, two, head, D, ahead, scores);
        scores += one.width + two.width;
    }
}

// Online softmax: scores become exp(score - max); updates the running max and sum; returns the factor for earlier sums.
template <typename T>
float softmax_update(float* scores, int first, int end, float scale, float& largest, float& total) {
    std::fill(scores, scores + first, NONE);
    std::fill(scores + end, scores + TILE, NONE);
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

// values [D] of G states = values * older + weights [G, TILE] times the tile's values [n, D]: C vectors from d on.
template <int G, int C, typename T>
ALWAYS_INLINE void weigh_columns(const float* weights, const float* older, const T* const* v, int64_t offset, int n,
                                 int64_t d, int width, float* const* states, Ahead<T>& ahead) {
    Floats sums[G][C];
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++) sums[g][c] = load(states[g] + d + c * LANES, width) * older[g];
    for (int t = 0; t < n; t++) {
        ahead.fetch_some();
        for (int c = 0; c < C; c++) {
            Floats value = load(v[t] + offset + d + c * LANES, width);
            for (int g = 0; g < G; g++) sums[g][c] += weights[g * TILE + t] * value;
        }
    }
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++) store(states[g] + d + c * LANES, sums[g][c], width);
}

// The same for as many of the D numbers as a processor's products of pairs can take; returns how many.
template <int G, typename T>
int64_t weigh_pairs(const float*, const float*, const T* const*, int64_t, int, int64_t, float* const*, Ahead<T>&) {
    return 0;
}

#if defined(__AVX512BF16__)
// C vectors from number d on, two positions at a time; weights are rounded to bf16, as in prefill.
template <int G, int C>
ALWAYS_INLINE void weigh_paired(const bf16* weights, const float* older, const bf16* const* v, int64_t offset, int n,
                                int64_t d, float* const* states, Ahead<bf16>& ahead) {
    Floats sums[G][C];
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++) sums[g][c] = load(states[g] + d + c * LANES) * older[g];
    for (int t = 0; t < n; t += 2) {
        ahead.fetch_some();
        for (int c = 0; c < C; c += 2) {
            Words even, odd{};
            std::memcpy(&even, v[t] + offset + d + c * LANES, sizeof even);
            if (t + 1 < n) std::memcpy(&odd, v[t + 1] + offset + d + c * LANES, sizeof odd);
            Words first = interleaved(even, odd, false), rest = interleaved(even, odd, true);
            for (int g = 0; g < G; g++) {
                Words pair = broadcast(weights + g * TILE + t);
                sums[g][c] = multiply_add(sums[g][c], pair, first, weights);
                sums[g][c + 1] = multiply_add(sums[g][c + 1], pair, rest, weights);
            }
        }
    }
    for (int g = 0; g < G; g++)
        for (int c = 0; c < C; c++) store(states[g] + d + c * LANES, sums[g][c]);
}

template <int G>
ALWAYS_INLINE int64_t weigh_pairs(const float* weights, const float* older, const bf16* const* v, int64_t offset, int n,
                                  int64_t D, float* const* states, Ahead<bf16>& ahead) {
    bf16 narrow[G * TILE];
    for (int i = 0; i < G * TILE; i += LANES) store(narrow + i, load(weights + i));
    int64_t d = 0;
    for (; d + 4 * LANES <= D; d += 4 * LANES) weigh_paired<G, 4>(narrow, older, v, offset, n, d, states, ahead);
    for (; d + 2 * LANES <= D; d += 2 * LANES) weigh_paired<G, 2>(narrow, older, v, offset, n, d, states, ahead);
    return d;
}
#endif

// The same for all D numbers, with as many sums at a time as hide the latency of one.
template <int G, typename T>
ALWAYS_INLINE void weigh(const float* weights, const float* older, const T* const* v, int64_t offset, int n, int64_t D,
                         float* const* states, Ahead<T>& ahead) {
    constexpr int C = G <= 2 ? 4 : G <= 4 ? 2 : 1;
    int64_t d = weigh_pairs<G>(weights, older, v, offset, n, D, states, ahead);
    for (; d + C * LANES <= D; d += C * LANES)
        weigh_columns<G, C>(weights, older, v, offset, n, d, LANES, states, ahead);
    for (; d < D; d += LANES)
        weigh_columns<G, 1>(weights, older, v, offset, n, d, std::min<int64_t>(LANES, D - d), states, ahead);
}

// The state of each split's online softmax: [splits, query heads, stride], of which values [D], the max, the sum.
struct States {
    float* at;
    int64_t n_heads, stride;
    float* of(const Split& split, int64_t head) const { return at + (split.id * n_heads + head) * stride; }
};

// What a task reads and writes.
template <typename T>
struct Work {
    const Queries<T>& queries;
    const Cache& cache;
    const Rows& rows;
    const States& states;
    int64_t head, head_end;
};

// One head of a tile for G query heads: row i is that of split i / n_shared, and one of those that share the head.
template <int G, typename T>
void attend_tile(const Work<T>& work, const Split* splits, int64_t row, const Tile<T>& tile, int64_t head,
                  Ahead<T>& ahead) {
    int64_t D = work.cache.D, n_shared = work.queries.n_heads / work.cache.n_heads;
    const T* q[G];
    float scores[(G + 1) * TILE], older[G], *states[G];
    for (int g = 0; g < G; g++) {
        const Split& split = splits[(row + g) / n_shared];
        int64_t i = head * n_shared + (row + g) % n_shared;
        q[g] = work.queries.at + split.token * work.queries.stride + i * D;
        states[g] = work.states.of(split, i);
    }
    score_tile<G>(q, tile, head, D, ahead, scores);
    for (int g = 0; g < G; g++)
        older[g] =
            softmax_update<T>(scores + g * TILE, tile.first, tile.end, work.queries.scale, states[g][D], states[g][D + 1]);
    weigh<G>(scores + tile.first, older, tile.v + tile.first, head * D, tile.end - tile.first, D, states, ahead);
}

// The same for n query heads, at most G.
template <int G, typename T>
void attend_rows(int64_t n, const Work<T>& work, const Split* splits, int64_t row, const Tile<T>& tile, int64_t head,
                 Ahead<T>& ahead) {
    if (n == G) attend_tile<G>(work, splits, row, tile, head, ahead);
    else if constexpr (G > 1) attend_rows<G - 1>(n, work, splits, row, tile, head, ahead);
}

// The tiles of n splits, the first of which is the longest, from position `at` on, as far as they end by `until`.
// Returns where the next one begins.
template <typename T>
int64_t attend_tiles(const Work<T>& work, const Split* splits, int64_t n, int64_t at, int64_t until) {
    int64_t D = work.cache.D, n_rows = n * (work.queries.n_heads / work.cache.n_heads),
            n_rounds = ceil_div(n_rows, ROWS);
    Tile<T> next = tile_at<T>(work.cache, work.rows, splits[0], at);
    while (next.n && next.start + next.n <= until) {
        Tile<T> tile = next;
        next = tile_at<T>(work.cache, work.rows, splits[0], tile.start + tile.n);
        Ahead<T> ahead(next, work.head, work.head_end, D, (work.head_end - work.head) * n_rounds * n_calls<T>(D));
        for (int64_t head = work.head; head < work.head_end; head++)
            for (int64_t t = 0; t < n_rounds; t++) {
                int64_t row = n_rows * t / n_rounds, end = n_rows * (t + 1) / n_rounds;
                attend_rows<ROWS>(end - row, work, splits, row, tile, head, ahead);
            }
    }
    return next.start;
}

// A shared group: first the tiles that its splits share, together, then each split's own.
template <typename T>
void attend_group(const Work<T>& work, const Split* splits, const SharedGroup& group) {
    int64_t n_shared = work.queries.n_heads / work.cache.n_heads, D = work.cache.D;
    for (int64_t p = 0; p < group.n; p++)
        for (int64_t h = work.head * n_shared; h < work.head_end * n_shared; h++) {
            float* state = work.states.of(splits[p], h);
            std::fill_n(state, D, 0.0f);
            state[D] = NONE, state[D + 1] = 0;
        }
    int64_t at = attend_tiles(work, splits, group.n, splits[0].start, group.common);
    for (int64_t p = 0; p < group.n; p++) attend_tiles(work, splits + p, 1, at, splits[p].end + TILE);
}

// The softmax over n splits of one head, whose states lie `step` apart, into out [D].
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

constexpr int64_t SPLITS_PER_MERGE = 8;

template <typename T>
void attend_singly(const Queries<T>& queries, const Cache& cache, const Rows& rows, const std::vector<Split>& splits,
                   T* out) {
    int64_t n_splits = splits.size(), stride = ceil_div(cache.D + 2, LANES) * LANES, n_heads = queries.n_heads;
    std::vector<float> memory(n_splits * n_heads * stride);
    States states{memory.data(), n_heads, stride};
    std::vector<Split> sorted = splits;
    std::vector<Task> tasks = tasks_of(shared_groups(sorted, rows, cache.block_size), cache.n_heads);
    parallel_each(tasks.size(), 1, [&](int64_t i) {
        Work<T> work{queries, cache, rows, states, tasks[i].head, tasks[i].head_end};
        attend_group(work, &sorted[tasks[i].group.first], tasks[i].group);
    });
    parallel_each(n_splits, SPLITS_PER_MERGE, [&](int64_t p) {
        if (p && splits[p - 1].token == splits[p].token) return;
        int64_t n = 1;
        while (p + n < n_splits && splits[p + n].token == splits[p].token) n++;
        for (int64_t h = 0; h < n_heads; h++)
            merge(states.of(splits[p], h), n_heads * stride, n, queries.sinks ? queries.sinks + h : nullptr, cache.D,
                  out + (splits[p].token * n_heads + h) * cache.D);
    });
}
