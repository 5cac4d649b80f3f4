// Attention over the paged cache: rows with few queries singly, chunks of a prompt together.
// The law: a query reads the positions that it sees and no other, so whatever else the cache holds never reaches it;
// and its result is the same to the bit whatever its batch mates. Read next: decode.h and prefill.h.
#include "decode.h"
#include "prefill.h"

constexpr int64_t FEW_WRITES = 1 << 10;  // numbers that one thread writes before others could have started
constexpr int64_t FEW_QUERIES = 3;  // up to which reading the cache again for each costs less than packing it

template <typename T>
static void attention(const Queries<T>& queries, const Cache& cache, const Rows& rows, T* out) {
    std::vector<Split> splits;
    std::vector<Chunk> chunks;
    int64_t n_tiles = 0;
    for (int64_t row = 0, token = 0; row < rows.n_rows; token = rows.query_ends[row++]) {
        int64_t n = rows.query_ends[row] - token, position = rows.context_lens[row] - n;
        for (int64_t i = 0; i < n && n <= FEW_QUERIES; i++)
            for (int64_t at = first_seen(position + i, queries.window); at <= position + i;) {
                int64_t end = std::min((at / SPLIT + 1) * SPLIT, position + i + 1);
                int64_t block = rows.table_of(row)[at / cache.block_size];
                splits.push_back({(int64_t)splits.size(), token + i, row, at, end, block});
                at = end;
            }
        if (n > FEW_QUERIES) {
            int64_t first = first_seen(position, queries.window);
            chunks.push_back(
                {row, token, n, position, first, ceil_div(position + n - first / KEYS * KEYS, KEYS), n_tiles});
            n_tiles += chunks.back().n_tiles;
        }
    }
    if (!splits.empty()) attend_singly(queries, cache, rows, splits, out);
    if (!chunks.empty()) attend_together(queries, cache, rows, chunks, out);
}

// Keys and values of tokens, at slots of a cache. A key's pairs lie in as many cache lines, so those of the next token
// are fetched, to be written, while this one's are.
template <typename T>
static void write_kv(const T* k, int64_t k_stride, const T* v, int64_t v_stride, const Cache& cache,
                     const int32_t* slots, int64_t n_tokens) {
    int64_t D = cache.D, n_pairs = D / PAIR<T>, size = cache.n_heads * D;
    auto each_pair = [&](int64_t token, auto visit) {
        for (int64_t head = 0; head < cache.n_heads; head++) {
            Key<T> key = key_of<T>(cache, slots[token], head);
            for (int64_t i = 0; i < n_pairs; i++) visit(key.at + i * key.step, head * n_pairs + i);
        }
    };
    parallel_each(n_tokens, std::max<int64_t>(FEW_WRITES / size, 1), [&](int64_t t) {
        if (t + 1 < n_tokens) each_pair(t + 1, [](T* at, int64_t) { __builtin_prefetch(at, 1, 2); });
        each_pair(t, [&](T* at, int64_t i) { std::memcpy(at, k + t * k_stride + i * PAIR<T>, 4); });
        std::memcpy((T*)cache.v + slots[t] * size, v + t * v_stride, size * sizeof(T));
    });
}

#define EXPORT(T, name)                                                                                               \
    extern "C" void attention_##name(const T* q, int64_t stride, int64_t n_heads, const T* k_cache, const T* v_cache, \
                                     int64_t block_size, int64_t n_kv_heads, int64_t D, const int32_t* block_tables,  \
                                     int64_t table_width, const int32_t* query_ends, const int32_t* context_lens,     \
                                     int64_t n_rows, float scale, int64_t window, const float* sinks, T* out) {       \
        attention<T>({q, stride, n_heads, scale, window, sinks}, {k_cache, v_cache, block_size, n_kv_heads, D},       \
                     {block_tables, query_ends, context_lens, n_rows, table_width}, out);                             \
    }                                                                                                                 \
    extern "C" void write_kv_##name(const T* k, int64_t k_stride, const T* v, int64_t v_stride, T* k_cache,           \
                                    T* v_cache, int64_t block_size, int64_t n_heads, int64_t D, const int32_t* slots, \
                                    int64_t n_tokens) {                                                               \
        write_kv<T>(k, k_stride, v, v_stride, {k_cache, v_cache, block_size, n_heads, D}, slots, n_tokens);           \
    }
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
#undef EXPORT
