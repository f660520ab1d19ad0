// Norms, rotary embedding and gated activations of rows. Compiled once per instruction set (compile_library.py).
//
// Arithmetic is float32 and rounds to the type of the rows where torch's operators, called one after the other, do.
#include "step_ops_kernel.h"

#include "rows.h"

namespace deltaserve {

namespace {

// What a norm multiplies a row by: 1 / sqrt(mean of squares + eps).
template <class E> DS_INLINE float norm_factor(const uint8_t* row, int64_t dim, float eps) {
    constexpr int kSums = 4;
    Vec sums[kSums] = {};
    for (int64_t c = 0; c < dim; c += kSums * kLanes)
        for (int i = 0; i < kSums && c + i * kLanes < dim; i++) {
            const Vec x = load_some<E>(row, c + i * kLanes, dim - c - i * kLanes);
            sums[i] = multiply_add(x, x, sums[i]);
        }
    const float mean = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) / (float)dim;
    return 1.f / __builtin_sqrtf(mean + eps);
}

// E: of rows, W: of weights.
template <class E, class W> void add_norm_rows(const DsAddNorm& call, int64_t first, int64_t end) {
    const int64_t dim = call.dim;
    for (int64_t r = first; r < end; r++) {
        const uint8_t* x = at<E>(call.x, r * call.x_stride);
        if (call.added != nullptr) {
            const uint8_t* added = at<E>(call.added, r * dim);
            uint8_t* sums = at<E>(call.sums, r * dim);
            const float factor = call.after == nullptr ? 0.f : norm_factor<E>(added, dim, call.eps);
            for (int64_t c = 0; c < dim; c += kLanes) {
                Vec more = load_some<E>(added, c, dim - c);
                if (call.after != nullptr)
                    more = E::rounded(more * factor * load_some<W>((const uint8_t*)call.after, c, dim - c));
                store_some<E>(sums, c, dim - c, load_some<E>(x, c, dim - c) + more);
            }
            x = sums;
        }
        const float factor = norm_factor<E>(x, dim, call.eps);
        uint8_t* normed = at<E>(call.normed, r * dim);
        for (int64_t c = 0; c < dim; c += kLanes) {
            const Vec weight = load_some<W>((const uint8_t*)call.weight, c, dim - c);
            store_some<E>(normed, c, dim - c, load_some<E>(x, c, dim - c) * factor * weight);
        }
    }
}

// E: of heads, W: of weights, which is what a norm without them rounds to.
template <class E, class W> struct Head {
    const uint8_t *x, *weight;  // weight: null without a norm
    float factor;

    DS_INLINE Vec load(int64_t channel, int64_t count) const {
        const Vec plain = load_some<E>(x, channel, count);
        if (weight == nullptr) return plain;
        const Vec normed = W::rounded(plain * factor);
        return E::rounded(W::rounded(normed * load_some<W>(weight, channel, count)));
    }
};

template <class E, class W> DS_INLINE void turn_head(const DsTurn& call, const Head<E, W>& head, int64_t token, uint8_t* out) {
    const int64_t half = call.turning_dim / 2;
    const uint8_t* cos = at<E>(call.cos, token * call.turning_dim);
    const uint8_t* sin = at<E>(call.sin, token * call.turning_dim);
    for (int64_t c = 0; c < half; c += kLanes) {
        const Vec low = head.load(c, half - c), high = head.load(half + c, half - c);
        const Vec low_part = E::rounded(low * load_some<E>(cos, c, half - c));
        const Vec high_part = E::rounded(high * load_some<E>(cos, half + c, half - c));
        store_some<E>(out, c, half - c, multiply_add(high, load_some<E>(sin, c, half - c), low_part));
        store_some<E>(out, half + c, half - c, multiply_add(low, load_some<E>(sin, half + c, half - c), high_part));
    }
    for (int64_t c = call.turning_dim; c < call.head_dim; c += kLanes)
        store_some<E>(out, c, call.head_dim - c, head.load(c, call.head_dim - c));
}

template <class E, class W> void turn_rows(const DsTurn& call, int64_t first, int64_t end) {
    for (int64_t token = first; token < end; token++)
        for (int64_t h = 0; h < call.num_heads; h++) {
            const uint8_t* x = at<E>(call.x, token * call.token_stride + h * call.head_stride);
            Head<E, W> head = {x, nullptr, 1.f};
            if (call.weight != nullptr) {
                head.weight = at<W>(call.weight, h * call.head_dim);
                head.factor = norm_factor<E>(x, call.head_dim, call.eps);
            }
            turn_head(call, head, token, at<E>(call.out, (token * call.num_heads + h) * call.head_dim));
        }
}

// e^x; infinite a little before float32 would be, and not 0 but 1e-38 below -87.
DS_INLINE Vec exp_of(Vec x) {
    const Vec shift = all(12582912.f);  // 1.5 * 2^23: the sum's last bits are rounded to an integer
    x = x < all(-87.f) ? all(-87.f) : x;
    x = x > all(89.f) ? all(89.f) : x;
    const Vec shifted = multiply_add(x, all(1.44269504f), shift);
    const Vec n = shifted - shift;
    const Vec f = multiply_add(n, all(2.12194440e-4f), multiply_add(n, all(-0.693359375f), x));  // x - n ln 2
    Vec p = all(1.9841270e-4f);
    p = multiply_add(p, f, all(1.3888889e-3f));
    p = multiply_add(p, f, all(8.3333333e-3f));
    p = multiply_add(p, f, all(4.1666667e-2f));
    p = multiply_add(p, f, all(1.6666667e-1f));
    p = multiply_add(p, f, all(0.5f));
    p = multiply_add(p, f, all(1.f));
    p = multiply_add(p, f, all(1.f));
    return p * (Vec)(((WordVec)shifted << 23) + 0x3f800000u);
}

struct Silu {
    static DS_INLINE Vec of(Vec x) { return x / (all(1.f) + exp_of(-x)); }
};

struct GeluTanh {  // 0.5 (1 + tanh u) = 1 / (1 + e^-2u)
    static DS_INLINE Vec of(Vec x) {
        const Vec u = all(0.79788456f) * multiply_add(all(0.044715f) * x * x, x, x);
        return x / (all(1.f) + exp_of(all(-2.f) * u));
    }
};

template <class E, class Activation> void gate_rows(const DsGate& call, int64_t first, int64_t end) {
    const int64_t dim = call.dim;
    for (int64_t r = first; r < end; r++) {
        const uint8_t* gate = at<E>(call.gate_up, 2 * r * dim);
        const uint8_t* up = at<E>(call.gate_up, (2 * r + 1) * dim);
        uint8_t* out = at<E>(call.out, r * dim);
        for (int64_t c = 0; c < dim; c += kLanes) {
            const Vec active = E::rounded(Activation::of(load_some<E>(gate, c, dim - c)));
            store_some<E>(out, c, dim - c, active * load_some<E>(up, c, dim - c));
        }
    }
}

// Each lane keeps the first of its largest values; of two lanes with the same value that which came first.
void peaks(const DsPeaks& call, int64_t first, int64_t end) {
    constexpr int kChains = 4;
    IntVec lanes;
    for (int i = 0; i < kLanes; i++) lanes[i] = i;
    for (int64_t r = first; r < end; r++) {
        const uint8_t* row = (const uint8_t*)(call.x + r * call.x_stride);
        const Vec lowest = all(-__builtin_inff());
        Vec best[kChains], check[kChains] = {};
        IntVec place[kChains] = {};
        for (int i = 0; i < kChains; i++) best[i] = lowest;
        const auto meet = [&](int i, Vec x, int64_t at) {
            check[i] += x - x;  // not a number where x is not finite
            const IntVec is_more = x > best[i];
            best[i] = is_more ? x : best[i];
            place[i] = is_more ? lanes + (int32_t)at : place[i];
        };
        int64_t c = 0;
        for (; c + kChains * kLanes <= call.dim; c += kChains * kLanes)
            for (int i = 0; i < kChains; i++) meet(i, Float32::load(row + 4 * (c + i * kLanes)), c + i * kLanes);
        for (; c + kLanes <= call.dim; c += kLanes) meet(0, Float32::load(row + 4 * c), c);
        if (c < call.dim) {
            float rest[kLanes];
            for (int i = 0; i < kLanes; i++) rest[i] = call.x[r * call.x_stride + (c + i < call.dim ? c + i : c)];
            // What fills up stands behind the value it repeats, and is never larger.
            meet(0, load(rest), c);
        }
        float most = best[0][0];
        int32_t index = place[0][0];
        for (int i = 0; i < kChains; i++)
            for (int j = 0; j < kLanes; j++)
                if (best[i][j] > most || (best[i][j] == most && place[i][j] < index)) {
                    most = best[i][j];
                    index = place[i][j];
                }
        call.indexes[r] = index;
        call.finite[r] = sum_of((check[0] + check[1]) + (check[2] + check[3])) == 0.f;
    }
}

void add_norm(const DsAddNorm& call, int64_t first, int64_t end) {
    if (call.type == DS_FLOAT32) return add_norm_rows<Float32, Float32>(call, first, end);
    if (call.weight_type == DS_FLOAT32) return add_norm_rows<BFloat16, Float32>(call, first, end);
    add_norm_rows<BFloat16, BFloat16>(call, first, end);
}

void turn(const DsTurn& call, int64_t first, int64_t end) {
    if (call.type == DS_FLOAT32) return turn_rows<Float32, Float32>(call, first, end);
    if (call.weight_type == DS_FLOAT32) return turn_rows<BFloat16, Float32>(call, first, end);
    turn_rows<BFloat16, BFloat16>(call, first, end);
}

void gate(const DsGate& call, int64_t first, int64_t end) {
    if (call.activation == DS_SILU)
        return call.type == DS_FLOAT32 ? gate_rows<Float32, Silu>(call, first, end)
                                       : gate_rows<BFloat16, Silu>(call, first, end);
    call.type == DS_FLOAT32 ? gate_rows<Float32, GeluTanh>(call, first, end)
                            : gate_rows<BFloat16, GeluTanh>(call, first, end);
}

}  // namespace

extern const StepOpsKernel DS_NAME(step_ops_, DELTASERVE_ISA) = {add_norm, turn, gate, peaks};

}  // namespace deltaserve
