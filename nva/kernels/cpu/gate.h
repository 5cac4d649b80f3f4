// The gates of a gated MLP: how far each opens for a number. float32 inside, rounded once.
#pragma once

#include "vectors.h"

// x / (1 + e^-z), which is x times the sigmoid of z.
inline Floats times_sigmoid(Floats x, Floats z) {
    Floats most = splat(88), power = exponential(smaller(most, -z));
    return x / (1.0f + (-z > most ? splat(INFINITY) : power));
}

inline Floats silu(Floats x) { return times_sigmoid(x, x); }

// Hendrycks and Gimpel 2016 with tanh: x (1 + tanh(z / 2)) / 2, which is x times the sigmoid of z, where
// z = 2 sqrt(2 / pi) (x + 0.044715 x^3).
inline Floats gelu_tanh(Floats x) { return times_sigmoid(x, 1.595769122f * (x + 0.044715f * x * x * x)); }

// out [inner] = gate(x) * up for x = (gate, up), each [inner]. out may be x itself.
template <Floats (*GATE)(Floats), typename T>
void gate_row(const T* x, T* out, int64_t inner) {
    for (int64_t i = 0; i < inner; i += LANES) {
        int n = std::min<int64_t>(LANES, inner - i);
        store(out + i, GATE(load(x + i, n)) * load(x + inner + i, n), n);
    }
}
