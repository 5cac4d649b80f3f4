// Threads of our own: a loop is cut into small pieces, and whoever has a core computes the next one.
//
// The law: a thread that lost its core to another program holds up one piece, never the loop. Each thread begins with a
// share of the loop, so that it reads memory in order, and takes one piece of it at a time; a thread that is done steals
// from the end of another's share (Blumofe and Leiserson 1999). The caller is one of the threads. When nothing is left
// it waits for those threads only that hold a piece: a thread that has not begun is not needed.
//
// Who waits spins for as long as the next loop of a decode step may take to come, then sleeps. A thread that spins for
// longer uses up its share of a busy core, and is off the core when there is work (OpenMP's threads do this).
// Which thread computes a piece is left to chance: so a piece's result must not depend on it.
// Read next: linear.cpp, which cuts a matrix product into pieces.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

// Threads that a loop may have, the caller's own included: torch.set_num_threads() and OMP_NUM_THREADS set them.
int n_threads();

// What threads compute of a loop: items [begin, end), by thread number `thread`, which is below n_threads().
using Body = std::function<void(int64_t begin, int64_t end, int thread)>;

void run_in_pool(int64_t n, int64_t grain, int n_wanted, const Body& body);

// body(begin, end, thread) for the items [0, n), at most `grain` of them at a time where there is more than one thread.
// Returns when all are done. Threads may call this at the same time, a body may call it, and so may a forked child.
template <typename Function>
void parallel(int64_t n, int64_t grain, const Function& body) {
    int n_wanted = std::min<int64_t>(n_threads(), (n + grain - 1) / grain);
    if (n_wanted > 1) run_in_pool(n, grain, n_wanted, std::cref(body));
    else if (n > 0) body(0, n, 0);
}

// body(i) for each i in [0, n).
template <typename Function>
void parallel_each(int64_t n, int64_t grain, const Function& body) {
    parallel(n, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; i++) body(i);
    });
}
