// Which experts compute which tokens, and the order in which their rows lie: expert by expert, so that each expert's
// weights are read once. Shazeer et al. 2017.
// The law: a token's choice depends on its own logits alone, to the bit. Read next: experts.cpp.
#pragma once

#include <utility>
#include <vector>

#include "vectors.h"

// A pair is a token and one of its experts. Pairs are numbered token by token, their rows expert by expert.
struct Routes {
    int64_t n_active;
    std::vector<int64_t> experts, rows;  // of each pair, a token's likeliest first; rows are -1 for padding
    std::vector<float> weights;          // of each pair
    std::vector<int64_t> tokens;         // of each row
    std::vector<int64_t> ends;           // of each expert's rows
    Routes(int64_t n_tokens, int64_t n_active)
        : n_active(n_active), experts(n_tokens * n_active), rows(experts.size()), weights(experts.size()) {}
};

// The likeliest n_active at the front, in order. Equally likely ones come as torch.topk has them, which is why the
// algorithms are these; NaN comes first, as it does there.
inline void sort_likeliest(std::vector<std::pair<float, int64_t>>& choices, int64_t n_active) {
    auto is_likelier = [](const auto& a, const auto& b) {
        return (a.first != a.first && b.first == b.first) || a.first > b.first;
    };
    auto first = choices.begin(), last = first + n_active;
    if (n_active * 64 <= (int64_t)choices.size()) return std::partial_sort(first, last, choices.end(), is_likelier);
    std::nth_element(first, last - 1, choices.end(), is_likelier);
    std::sort(first, last - 1, is_likelier);
}

// A token's experts, and their shares of the softmax over all experts, or over its own if `normalize`, rounded to T.
template <typename T>
void route(const T* logits, int64_t n_experts, bool normalize, int64_t n_active, int64_t* experts, float* weights) {
    std::vector<std::pair<float, int64_t>> choices(n_experts);
    for (int64_t e = 0; e < n_experts; e++) choices[e] = {load(logits + e, 1)[0], e};
    sort_likeliest(choices, n_active);
    int64_t n = normalize ? n_active : n_experts;
    std::vector<float> shares(ceil_div(n, LANES) * LANES, -INFINITY);
    for (int64_t i = 0; i < n; i++) shares[i] = choices[i].first - choices[0].first;
    Floats total{};
    for (int64_t i = 0; i < n; i += LANES) {
        Floats share = exponential(load(&shares[i]));
        total += share;
        store(&shares[i], share);
    }
    for (int64_t i = 0; i < n_active; i++) {
        experts[i] = choices[i].second;
        weights[i] = rounded(splat(shares[i] / sum(total)), logits)[0];
    }
}

// Where each pair's row lies: expert by expert, and in the order of the tokens.
inline void group(Routes& routes, const bool* is_padding, int64_t n_tokens, int64_t n_experts) {
    std::vector<int64_t> next(n_experts + 1);
    for (int64_t pair = 0; pair < n_tokens * routes.n_active; pair++)
        if (!is_padding[pair / routes.n_active]) next[routes.experts[pair] + 1]++;
    for (int64_t e = 0; e < n_experts; e++) next[e + 1] += next[e];
    routes.ends.assign(next.begin() + 1, next.end());
    routes.tokens.resize(next[n_experts]);
    for (int64_t pair = 0; pair < n_tokens * routes.n_active; pair++) {
        int64_t token = pair / routes.n_active;
        routes.rows[pair] = is_padding[token] ? -1 : next[routes.experts[pair]]++;
        if (!is_padding[token]) routes.tokens[routes.rows[pair]] = token;
    }
}
