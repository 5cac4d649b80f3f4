// A tile: the keys and values that decode attention computes on at a time, and the prefetch of the next tile meanwhile.
// The law: all of a tile comes from one split, and every position of a split is in one tile.
// Read next: decode.h, which computes on tiles.
#pragma once

#include "splits.h"

// Keys of some positions side by side, for the first head.
template <typename T>
struct Group {
    const T* at;
    int64_t width;
};

// Whole groups, and the values of their positions for the first head. The split has the positions [first, end) of it.
template <typename T>
struct Tile {
    Group<T> groups[TILE];
    const T* v[TILE];
    int64_t start;
    int n_groups = 0, n = 0, first = 0, end = 0;
};

template <typename T>
Tile<T> tile_at(const Cache& cache, const Rows& rows, const Split& split, int64_t at) {
    Tile<T> tile;
    int64_t size = cache.n_heads * cache.D, offset = at % cache.block_size;
    at = tile.start = at - offset + cache.group_start(offset);
    while (at < split.end) {
        int64_t slot = slot_of(rows, split.row, at, cache.block_size), width = cache.group_width(at % cache.block_size);
        if (tile.n + width > TILE) break;
        tile.groups[tile.n_groups++] = {(const T*)cache.k + slot * size, width};
        for (int i = 0; i < width; i++) tile.v[tile.n++] = (const T*)cache.v + (slot + i) * size;
        at += width;
    }
    tile.first = std::max<int64_t>(0, split.start - tile.start);
    tile.end = std::min<int64_t>(tile.n, split.end - tile.start);
    return tile;
}

// The cache lines of a tile for heads [head, head_end), in the order of their addresses. They are fetched evenly over
// the work on the tile before it, since memory that waits in bursts is idle in between.
template <typename T>
struct Ahead {
    static constexpr int64_t LINE = 64 / sizeof(T);
    static constexpr uint64_t ONE = 1 << 16;
    struct Run {
        const T* at;
        int64_t n;
    };
    Run runs[2 * TILE];
    int64_t n_runs = 0, run = 0;
    const T *at = nullptr, *end = nullptr;  // what is left of the last run
    uint64_t owed = 0, rate = 0;            // lines, as fractions of ONE

    Ahead(const Tile<T>& tile, int64_t head, int64_t head_end, int64_t D, int64_t n_calls) {
        int64_t size = (head_end - head) * D;
        for (int i = 0; i < tile.n_groups; i++) {
            Group<T> group = tile.groups[i];
            add(group.at + head * D * group.width, size * group.width);
        }
        for (int i = 0; i < tile.n; i++) add(tile.v[i] + head * D, size);
        rate = rate * ONE / n_calls + 1;
    }

    void add(const T* begin, int64_t n) {
        if (n_runs && runs[n_runs - 1].at + runs[n_runs - 1].n == begin) runs[n_runs - 1].n += n;
        else runs[n_runs++] = {begin, n};
        rate += ceil_div(n, LINE);
    }

    ALWAYS_INLINE void fetch_some() {
        owed += rate;
        const T *p = at, *stop = end;
        for (int64_t n = owed / ONE; n > 0; n--, p += LINE) {
            if (p >= stop) {
                if (run == n_runs) break;
                p = runs[run].at, stop = p + runs[run].n, run++;
            }
            __builtin_prefetch(p, 0, 2);
        }
        owed %= ONE;
        at = p, end = stop;
    }
};
