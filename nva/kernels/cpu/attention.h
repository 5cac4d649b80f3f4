// What both ways of attending share: a layer's cache seen through the block tables, and the rows of a step.
#pragma once

#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

#include "matmul.h"
#include "threads.h"

// [n_ids, block_size, n_heads, D] twice. Values lie as this says. Keys of a block lie in groups of LANES positions, the
// last perhaps of fewer, each group [n_heads, D / PAIR, positions, PAIR]: so one load brings a pair of every position's
// key, and the scores of a group are sums side by side.
struct Cache {
    const void *k, *v;
    int64_t block_size, n_heads, D;
    int64_t group_start(int64_t offset) const { return offset / LANES * LANES; }
    int64_t group_width(int64_t start) const { return std::min<int64_t>(LANES, block_size - start); }
};

// A key: pair i of it lies at `at + i * step`.
template <typename T>
struct Key {
    T* at;
    int64_t step;
};

template <typename T>
Key<T> key_of(const Cache& cache, int64_t slot, int64_t head) {
    int64_t offset = slot % cache.block_size, start = cache.group_start(offset), width = cache.group_width(start);
    T* group = (T*)cache.k + (slot - offset + start) * cache.n_heads * cache.D;
    return {group + head * width * cache.D + (offset - start) * PAIR<T>, width * PAIR<T>};
}

struct Rows {
    const int32_t *block_tables, *query_ends, *context_lens;
    int64_t n_rows, table_width;
    const int32_t* table_of(int64_t row) const { return block_tables + row * table_width; }
};

template <typename T>
struct Queries {  // [T, n_heads, D], tokens `stride` apart
    const T* at;
    int64_t stride, n_heads;
    float scale;
    int64_t window;      // positions that a query sees; 0 for all
    const float* sinks;  // [n_heads] or null
};

// Terms of the exponential's series: weights that are rounded to bf16 need few.
template <typename T>
constexpr int DEGREE = sizeof(T) == 2 ? 4 : 6;

constexpr float NONE = -std::numeric_limits<float>::infinity();

// The first position that a query sees.
inline int64_t first_seen(int64_t position, int64_t window) {
    return window ? std::max<int64_t>(0, position - window + 1) : 0;
}

// Where position `at` of a row lies in the cache, counted in tokens.
inline int64_t slot_of(const Rows& rows, int64_t row, int64_t at, int64_t block_size) {
    return rows.table_of(row)[at / block_size] * block_size + at % block_size;
}
