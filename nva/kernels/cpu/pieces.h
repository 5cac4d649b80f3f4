// What a core reads at a time when single queries attend, and how it is fetched while there is arithmetic to do on what
// was read before. The law: all of a piece comes from one part, and every position of a part is in one piece.
// Read next: decode.h, which computes on pieces.
#pragma once

#include "parts.h"

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

// The cache lines of a piece for heads [head, head_end), in the order of their addresses. They are fetched evenly over
// the work on the piece before it, since memory that waits in bursts is idle in between.
template <typename T>
struct Ahead {
    static constexpr int64_t LINE = 64 / sizeof(T);
    static constexpr uint64_t ONE = 1 << 16;
    struct Run {
        const T* at;
        int64_t n;
    };
    Run runs[2 * PIECE];
    int64_t n_runs = 0, run = 0;
    const T *at = nullptr, *end = nullptr;  // what is left of the last run
    uint64_t owed = 0, rate = 0;            // lines, in parts of ONE

    Ahead(const Piece<T>& piece, int64_t head, int64_t head_end, int64_t D, int64_t n_calls) {
        int64_t size = (head_end - head) * D;
        for (int i = 0; i < piece.n_groups; i++) {
            Group<T> group = piece.groups[i];
            add(group.at + head * D * group.width, size * group.width);
        }
        for (int i = 0; i < piece.n; i++) add(piece.v[i] + head * D, size);
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
