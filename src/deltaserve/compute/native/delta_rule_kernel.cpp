// The gated delta rule, token by token. Compiled once per instruction set (compile_library.py).
//
// A token reads its head's state twice, some columns at a time: those stay in the first cache while all tokens of a request
// meet them. Each column is a chain of its own, so bits depend neither on other heads and requests nor on where the tokens
// of one are cut.
#include "delta_rule_kernel.h"

#include "rows.h"

namespace deltaserve {

namespace {

// Some columns of the state of one head, and of what its tokens bring.
struct Columns {
    float* state;        // of the first key channel
    const float *q, *k;  // of the head's first token, as are the next ones
    const float *v, *decay, *beta;
    float* out;
    int64_t count;  // of the last vector, where that is not whole
};

template <bool kWhole> DS_INLINE Vec get(const float* from, int64_t count) {
    return kWhole ? load(from) : load_some<Float32>((const uint8_t*)from, 0, count);
}

template <bool kWhole> DS_INLINE void put(float* to, int64_t count, Vec x) {
    kWhole ? store(to, x) : store_some<Float32>((uint8_t*)to, 0, count, x);
}

template <bool kWhole, int kVectors> void pass_tokens(const DsDeltaRule& call, Columns at, int64_t num_tokens) {
    const int64_t row = call.value_dim;
    for (int64_t t = 0; t < num_tokens; t++) {
        const Vec decay = all(*at.decay), beta = all(*at.beta);
        Vec expected[2][kVectors] = {};  // of even and odd key channels
        for (int64_t i = 0; i < call.key_dim; i++) {
            const Vec k = all(at.k[i]);
            for (int v = 0; v < kVectors; v++)
                expected[i & 1][v] = multiply_add(k, get<kWhole>(at.state + i * row + v * kLanes, at.count), expected[i & 1][v]);
        }
        Vec added[kVectors], out[2][kVectors] = {};
        for (int v = 0; v < kVectors; v++)
            added[v] = (get<kWhole>(at.v + v * kLanes, at.count) - decay * (expected[0][v] + expected[1][v])) * beta;
        for (int64_t i = 0; i < call.key_dim; i++) {
            const Vec k = all(at.k[i]), q = all(at.q[i]);
            for (int v = 0; v < kVectors; v++) {
                float* const channel = at.state + i * row + v * kLanes;
                const Vec state = multiply_add(k, added[v], get<kWhole>(channel, at.count) * decay);
                put<kWhole>(channel, at.count, state);
                out[i & 1][v] = multiply_add(q, state, out[i & 1][v]);
            }
        }
        for (int v = 0; v < kVectors; v++) put<kWhole>(at.out + v * kLanes, at.count, out[0][v] + out[1][v]);
        at.q += call.num_key_heads * call.key_dim;
        at.k += call.num_key_heads * call.key_dim;
        at.v += call.num_heads * row;
        at.out += call.num_heads * row;
        at.decay += call.num_heads;
        at.beta += call.num_heads;
    }
}

void pass_heads(const DsDeltaRule& call, int64_t first, int64_t end) {
    constexpr int kVectors = 4;
    for (int64_t pair = first; pair < end; pair++) {
        const int64_t* span = call.spans + 3 * (pair / call.num_heads);
        const int64_t head = pair % call.num_heads, token = span[1];
        const int64_t key_head = token * call.num_key_heads + head / (call.num_heads / call.num_key_heads);
        const int64_t value_head = token * call.num_heads + head;
        for (int64_t column = 0; column < call.value_dim;) {
            const int64_t left = call.value_dim - column;
            float* const state = call.states + (span[0] * call.num_heads + head) * call.key_dim * call.value_dim + column;
            const Columns at = {state,
                                call.q + key_head * call.key_dim,
                                call.k + key_head * call.key_dim,
                                call.v + value_head * call.value_dim + column,
                                call.decay + value_head,
                                call.beta + value_head,
                                call.out + value_head * call.value_dim + column,
                                left};
            if (left >= kVectors * kLanes) {
                pass_tokens<true, kVectors>(call, at, span[2]);
                column += kVectors * kLanes;
            } else {
                left >= kLanes ? pass_tokens<true, 1>(call, at, span[2]) : pass_tokens<false, 1>(call, at, span[2]);
                column += kLanes;
            }
        }
    }
}

}  // namespace

extern const DeltaRuleKernel DS_NAME(delta_rule_, DELTASERVE_ISA) = {pass_heads};

}  // namespace deltaserve
