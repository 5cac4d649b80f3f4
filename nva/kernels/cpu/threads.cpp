// The pool behind threads.h: loops that are open to all, workers that look for them, and who wakes whom.
#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr int MOST_THREADS = 256;
constexpr int MOST_LOOPS = 16;                   // at the same time; the caller of one more computes it alone
constexpr auto SPIN = microseconds(50);          // longer than the gap between two kernels of a step
constexpr auto LOST_CORE = microseconds(50);     // a gap between two looks at the clock: another program ran
constexpr auto LONGEST_TURN = microseconds(1000);  // well below the time after which a scheduler takes the core away

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether it became true while spinning. Gives up early where the core is wanted by others.
template <typename Condition>
bool spin_until(const Condition& is_met) {
    auto start = Clock::now(), before = start;
    while (true) {
        for (int i = 0; i < 16; i++) {
            if (is_met()) return true;
            relax();
        }
        auto now = Clock::now();
        if (now - start > SPIN || now - before > LOST_CORE) return false;
        before = now;
    }
}

// What is left of a thread's share: items [begin, end), in one word so that taking some is one atomic step.
class alignas(64) Share {
   public:
    void set(int64_t begin, int64_t end) { word.store(packed(begin, end), std::memory_order_relaxed); }

    // Its owner takes from the front, others from the end. False if nothing is left.
    bool take(int64_t grain, bool is_owner, int64_t* begin, int64_t* end) {
        uint64_t seen = word.load(std::memory_order_relaxed), rest;
        do {
            int64_t first = seen >> 32, last = seen & 0xFFFFFFFF;
            if (first >= last) return false;
            *begin = is_owner ? first : std::max(first, last - grain);
            *end = is_owner ? std::min(last, first + grain) : last;
            rest = is_owner ? packed(*end, last) : packed(first, *begin);
        } while (!word.compare_exchange_weak(seen, rest, std::memory_order_relaxed));
        return true;
    }

   private:
    std::atomic<uint64_t> word{0};
    static uint64_t packed(int64_t begin, int64_t end) { return (uint64_t)begin << 32 | (uint64_t)end; }
};

// A place for a loop that runs. Its state: whether threads may enter, whether the caller sleeps, and how many are in.
struct Loop {
    static constexpr int OPEN = 1 << 30, SLEEPS = 1 << 29;
    alignas(64) std::atomic<bool> is_taken{false};
    alignas(64) std::atomic<int> state{0};
    int n_threads = 0;
    int64_t grain = 0;
    const Body* body = nullptr;
    std::fenv_t rounding;  // how the caller rounds, and whether it flushes denormal numbers: so do all
    std::mutex mutex;
    std::condition_variable is_empty;
    Share shares[MOST_THREADS];

    void open(int64_t n, int64_t grain_, int n_threads_, const Body& body_) {
        n_threads = n_threads_, grain = grain_, body = &body_;
        std::fegetenv(&rounding);
        for (int t = 0; t < n_threads; t++) shares[t].set(n * t / n_threads, n * (t + 1) / n_threads);
        state.fetch_or(OPEN, std::memory_order_release);
    }

    // Compute what is left, a thread's own share first, until nothing is or the turn is over.
    template <typename Condition>
    void run(int thread, const Condition& is_turn_over) {
        int64_t begin, end;
        for (int i = 0; i < n_threads; i++) {
            Share& share = shares[(thread + i) % n_threads];
            while (!is_turn_over() && share.take(grain, i == 0, &begin, &end)) (*body)(begin, end, thread);
        }
    }

    // A worker's part. False if the loop isn't open, or has no share for it.
    template <typename Condition>
    bool help(int thread, const Condition& is_turn_over) {
        int seen = state.load(std::memory_order_relaxed);
        do {
            if (!(seen & OPEN)) return false;
        } while (!state.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire));
        bool is_wanted = thread < n_threads;
        if (is_wanted) {
            std::fesetenv(&rounding);
            run(thread, is_turn_over);
        }
        if (state.fetch_sub(1, std::memory_order_acq_rel) == (SLEEPS | 1)) {
            { std::lock_guard<std::mutex> lock(mutex); }
            is_empty.notify_all();
        }
        return is_wanted;
    }

    // Let nobody in any more, and wait for those who are.
    void close() {
        state.fetch_and(~OPEN, std::memory_order_relaxed);
        if (spin_until([&] { return state.load(std::memory_order_acquire) == 0; })) return;
        std::unique_lock<std::mutex> lock(mutex);
        state.fetch_or(SLEEPS, std::memory_order_relaxed);
        is_empty.wait(lock, [&] { return state.load(std::memory_order_acquire) == SLEEPS; });
        state.store(0, std::memory_order_relaxed);
    }
};

// The threads of GNU's OpenMP, which torch uses, spin for milliseconds after each of torch's loops, unless they were told
// not to before torch was loaded (nva/host/openmp.py), and our workers need their cores. They sleep soon where a process
// has more of them than there are cores, as its manual says of GOMP_SPINCOUNT: so a team of that many is started, to
// sleep.
void calm_openmp() {
    auto start_team = (void (*)(void (*)(void*), void*, unsigned, unsigned))dlsym(RTLD_DEFAULT, "GOMP_parallel");
    if (!start_team || std::getenv("GOMP_SPINCOUNT") || std::getenv("OMP_WAIT_POLICY")) return;
    std::thread([=] {
        start_team([](void*) {}, nullptr, std::thread::hardware_concurrency() + 1, 0);
        while (true) pause();
    }).detach();
}

class Pool {
   public:
    void run(int64_t n, int64_t grain, int n_wanted, const Body& body) {
        Loop* loop = std::find_if(loops, loops + MOST_LOOPS, [](Loop& each) {
            return !each.is_taken.load(std::memory_order_relaxed) && !each.is_taken.exchange(true);
        });
        if (loop == loops + MOST_LOOPS) return body(0, n, 0);
        loop->open(n, grain, start_workers(n_wanted), body);
        call_workers();
        loop->run(0, [] { return false; });  // the caller's own turn lasts as long as the loop
        loop->close();
        loop->is_taken.store(false, std::memory_order_release);
    }

   private:
    Loop loops[MOST_LOOPS];
    std::atomic<int> n_workers{0};
    alignas(64) std::atomic<unsigned> n_calls{0};
    alignas(64) std::atomic<int> n_asleep{0};
    std::mutex mutex;
    std::condition_variable is_called;

    // Workers for n threads, or as many as the system gives. Returns the threads there are then, the caller included.
    int start_workers(int n) {
        if (n_workers.load(std::memory_order_relaxed) + 1 >= n) return n;
        std::lock_guard<std::mutex> lock(mutex);
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
        try {
            if (n_workers == 0) calm_openmp();
            for (int i = n_workers; i + 1 < n; n_workers = ++i) std::thread([this, i] { work(i + 1); }).detach();
        } catch (const std::system_error&) {  // a limit on threads is reached: those that there are do the work
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return std::min(n, n_workers + 1);
    }

    void call_workers() {
        n_calls.fetch_add(1);  // in one order with n_asleep: a worker sees the call, or is seen to sleep
        if (n_asleep.load() == 0) return;
        { std::lock_guard<std::mutex> lock(mutex); }
        is_called.notify_all();
    }

    // A worker that has computed for a whole turn offers its core to others while it holds no piece. Nobody may want
    // it, and then this costs nothing; on a busy core the scheduler would take it soon, amid a piece.
    [[noreturn]] void work(int thread) {
        auto turn_start = Clock::now();
        auto is_turn_over = [&] { return Clock::now() - turn_start > LONGEST_TURN; };
        while (true) {
            unsigned seen = n_calls.load(std::memory_order_acquire);
            bool helped = false;
            for (Loop& loop : loops) helped |= loop.help(thread, is_turn_over);
            if (is_turn_over()) {
                sched_yield();
                turn_start = Clock::now();
            }
            if (helped || spin_until([&] { return n_calls.load(std::memory_order_acquire) != seen; })) continue;
            std::unique_lock<std::mutex> lock(mutex);
            n_asleep.fetch_add(1);
            is_called.wait(lock, [&] { return n_calls.load() != seen; });
            n_asleep.fetch_sub(1);
            turn_start = Clock::now();
        }
    }
};

std::atomic<Pool*> pool{nullptr};  // made when first needed; never deleted, since its threads outlive main()

// The pool of this process. A child of a fork has none of its parent's threads, so it makes its own.
Pool& the_pool() {
    static bool is_registered = !pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });
    (void)is_registered;
    Pool* found = pool.load(std::memory_order_acquire);
    if (found) return *found;
    Pool* made = new Pool;
    if (pool.compare_exchange_strong(found, made)) return *made;
    delete made;  // another thread was first
    return *found;
}

}  // namespace

static std::atomic<int> most_threads{MOST_THREADS};

int n_threads() {
    static auto openmp = (int (*)())dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    static int n_cores = std::thread::hardware_concurrency();
    return std::clamp(openmp ? openmp() : n_cores, 1, most_threads.load(std::memory_order_relaxed));
}

// Never more threads than n, whatever torch has.
extern "C" void limit_threads(int64_t n) { most_threads = std::clamp<int64_t>(n, 1, MOST_THREADS); }

void run_in_pool(int64_t n, int64_t grain, int n_wanted, const Body& body) {
    the_pool().run(n, grain, n_wanted, body);
}
