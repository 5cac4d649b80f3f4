// The tasks of decode attention: a context is cut into splits (Flash-Decoding, Dao et al. 2023), and the splits of rows
// that share a prefix are read together (cascade attention, Ye et al. 2024; Hydragen, Juravsky et al. 2024).
//
// A context is cut at multiples of SPLIT positions, whatever else is in the batch: one long row keeps all cores busy,
// and rows of different lengths balance. Splits with the same blocks form a shared group. The law: a shared group saves
// reads and nothing else; each split's arithmetic is what it would be alone.
#pragma once

#include <tuple>

#include "attention.h"

constexpr int64_t SPLIT = 256;
constexpr int TILE = 2 * LANES;          // positions whose scores are held in registers
constexpr int64_t MOST_SHARING = 16;     // splits of a shared group: with more, few groups would keep few cores busy
constexpr int64_t TASKS_PER_THREAD = 4;  // tasks differ in length: with several a thread, all threads end together

// One query and the positions [start, end) of its context; `block` is the block in which they begin.
struct Split {
    int64_t id, token, row, start, end, block;
};

// Splits [first, first + n) of a list. They begin at one position, and have the same blocks up to position `common`.
struct SharedGroup {
    int64_t first, n, common;
};

// Up to which position two splits that begin together have the same blocks; their beginning if they don't.
inline int64_t common_end(const Split& a, const Split& b, const Rows& rows, int64_t block_size) {
    if (a.start != b.start || a.block != b.block) return a.start;
    const int32_t *one = rows.table_of(a.row), *two = rows.table_of(b.row);
    int64_t i = a.start / block_size, end = std::min(a.end, b.end);
    while (i * block_size < end && one[i] == two[i]) i++;
    return std::min(i * block_size, end);
}

// Sorts splits so that those with the same blocks are neighbours, longest first, and returns the shared groups: where at
// least one tile is common, reading it together pays. A group's tiles are those of its longest split, because a tile
// must not end where a shorter split does.
inline std::vector<SharedGroup> shared_groups(std::vector<Split>& splits, const Rows& rows, int64_t block_size) {
    auto key = [](const Split& split) { return std::make_tuple(split.start, split.block, -split.end, split.id); };
    std::sort(splits.begin(), splits.end(), [&](const Split& a, const Split& b) { return key(a) < key(b); });
    std::vector<SharedGroup> groups;
    for (int64_t i = 0; i < (int64_t)splits.size(); i++) {
        int64_t common = i ? common_end(splits[groups.back().first], splits[i], rows, block_size) : 0;
        SharedGroup* last = common >= splits[i].start + TILE ? &groups.back() : nullptr;
        if (last && last->n == 1) *last = {last->first, 2, common};
        else if (last && last->n < MOST_SHARING && common >= last->common) last->n++;
        else groups.push_back({i, 1, 0});
    }
    return groups;
}

// A shared group's work for key-value heads [head, head_end).
struct Task {
    SharedGroup group;
    int64_t head, head_end;
};

// The tasks of all shared groups, large ones first. A group of several splits is cut by heads; so are all groups if
// they are few.
inline std::vector<Task> tasks_of(const std::vector<SharedGroup>& groups, int64_t n_heads) {
    int64_t few = std::min(n_heads, ceil_div(TASKS_PER_THREAD * n_threads(), groups.size()));
    std::vector<Task> tasks;
    for (const SharedGroup& group : groups)
        for (int64_t i = 0, n = group.n > 1 ? n_heads : few; i < n; i++)
            tasks.push_back({group, n_heads * i / n, n_heads * (i + 1) / n});
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.group.n > b.group.n; });
    return tasks;
}
