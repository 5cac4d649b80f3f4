// What a core works on when single queries attend: parts of their contexts, and which of these are read together.
//
// A context is cut at multiples of PART positions, whatever else is in the batch: one long row keeps all cores busy,
// and ragged rows balance. Parts that are the same blocks, as rows with one prompt have them, become a bundle. The law:
// a bundle saves reads and nothing else; each part's arithmetic is what it would be alone.
#pragma once

#include <tuple>

#include "attention.h"

constexpr int64_t PART = 256;
constexpr int PIECE = 2 * LANES;         // positions whose scores are held in registers
constexpr int64_t MOST_PARTS = 16;       // of a bundle: with more, few bundles would keep few cores busy
constexpr int64_t UNITS_PER_THREAD = 4;  // that even out

// A query, and the positions [start, end) that it looks at, which begin in a block.
struct Part {
    int64_t id, token, row, start, end, block;
};

// Parts [first, first + n) of a list. They begin at one position, and have the same blocks up to position `common`.
struct Bundle {
    int64_t first, n, common;
};

// Up to which position two parts that begin together have the same blocks; their beginning if they don't.
inline int64_t common_end(const Part& a, const Part& b, const Rows& rows, int64_t block_size) {
    if (a.start != b.start || a.block != b.block) return a.start;
    const int32_t *one = rows.table_of(a.row), *two = rows.table_of(b.row);
    int64_t i = a.start / block_size, end = std::min(a.end, b.end);
    while (i * block_size < end && one[i] == two[i]) i++;
    return std::min(i * block_size, end);
}

// Puts parts with the same blocks side by side, longest first, and says which share so much that reading it together
// pays. A bundle's pieces are those of its longest part, since they must not end where only another part does.
inline std::vector<Bundle> bundled(std::vector<Part>& parts, const Rows& rows, int64_t block_size) {
    auto key = [](const Part& part) { return std::make_tuple(part.start, part.block, -part.end, part.id); };
    std::sort(parts.begin(), parts.end(), [&](const Part& a, const Part& b) { return key(a) < key(b); });
    std::vector<Bundle> bundles;
    for (int64_t i = 0; i < (int64_t)parts.size(); i++) {
        int64_t common = i ? common_end(parts[bundles.back().first], parts[i], rows, block_size) : 0;
        Bundle* last = common >= parts[i].start + PIECE ? &bundles.back() : nullptr;
        if (last && last->n == 1) *last = {last->first, 2, common};
        else if (last && last->n < MOST_PARTS && common >= last->common) last->n++;
        else bundles.push_back({i, 1, 0});
    }
    return bundles;
}

// A bundle's work for key-value heads [head, head_end).
struct Unit {
    Bundle bundle;
    int64_t head, head_end;
};

// Units of work, large ones first. A bundle is split by heads; so is everything if there is little of it.
inline std::vector<Unit> units_of(const std::vector<Bundle>& bundles, int64_t n_heads) {
    int64_t few = std::min(n_heads, ceil_div(UNITS_PER_THREAD * n_threads(), bundles.size()));
    std::vector<Unit> units;
    for (const Bundle& bundle : bundles)
        for (int64_t i = 0, n = bundle.n > 1 ? n_heads : few; i < n; i++)
            units.push_back({bundle, n_heads * i / n, n_heads * (i + 1) / n});
    std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.bundle.n > b.bundle.n; });
    return units;
}
