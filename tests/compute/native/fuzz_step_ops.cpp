// Random rows through the operators and products of the native library against double precision. Every array has exactly
// the size that the library may touch, so that a sanitizer sees any step beyond. fuzz_step_ops SEEDS [FIRST]
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <vector>

#include "native.h"

namespace {

using Random = std::mt19937_64;

int64_t pick(Random& random, int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// Numbers of one type, and what they are.
struct Array {
    int type;
    std::vector<uint8_t> bytes;

    Array(int of_type, int64_t count) : type(of_type), bytes(count * size()) {}
    int64_t size() const { return type == DS_FLOAT32 ? 4 : 2; }
    int64_t count() const { return (int64_t)bytes.size() / size(); }
    void* data() { return bytes.data(); }
    double operator[](int64_t i) const {
        uint32_t bits = 0;
        memcpy((uint8_t*)&bits + 4 - size(), &bytes[i * size()], size());
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
    void set(int64_t i, float x) { memcpy(&bytes[i * size()], (uint8_t*)&x + 4 - size(), size()); }
};

Array draw(Random& random, int type, int64_t count) {
    Array made(type, count);
    std::normal_distribution<float> normal(0, 1);
    for (int64_t i = 0; i < count; i++) made.set(i, normal(random));
    return made;
}

struct Machine {
    DsContext* context;
    int isa;
};

bool is_near(const char* what, const Array& got, const std::vector<double>& want, double size) {
    const double tolerance = size * (got.type == DS_FLOAT32 ? 2e-5 : 4e-2);
    for (int64_t i = 0; i < got.count(); i++)
        if (!(fabs(got[i] - want[i]) <= tolerance * (1 + fabs(want[i])))) {
            fprintf(stderr, "%s: %g at %ld, expected %g\n", what, got[i], (long)i, want[i]);
            return false;
        }
    return true;
}

double norm_factor(const Array& x, int64_t first, int64_t count, double eps) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += x[first + i] * x[first + i];
    return 1 / sqrt(sum / count + eps);
}

bool check_norm(Random& random, const Machine& machine, int type, int weight_type) {
    const int64_t rows = pick(random, 0, 9), dim = pick(random, 1, 200);
    const bool adds = pick(random, 0, 1), has_after = pick(random, 0, 1);
    const int64_t stride = adds ? dim : dim + pick(random, 0, 5);
    Array x = draw(random, type, rows ? (rows - 1) * stride + dim : 0), added = draw(random, type, rows * dim);
    Array weight = draw(random, weight_type, dim), after = draw(random, weight_type, dim);
    Array sums(type, rows * dim), normed(type, rows * dim);
    const DsAddNorm call = {type, weight_type, rows, dim, x.data(), stride, adds ? added.data() : nullptr,
                            has_after ? after.data() : nullptr, weight.data(), adds ? sums.data() : nullptr,
                            normed.data(), 1e-5f};
    if (!ds_add_norm(machine.context, machine.isa, &call)) return false;
    std::vector<double> want_sums, want;
    for (int64_t r = 0; r < rows; r++) {
        const double of_added = adds && has_after ? norm_factor(added, r * dim, dim, 1e-5) : 1;
        for (int64_t c = 0; c < dim; c++) {
            const double more = added[r * dim + c] * of_added * (has_after ? after[c] : 1);
            want_sums.push_back(x[r * stride + c] + (adds ? more : 0));
        }
        const double factor = adds ? norm_factor(sums, r * dim, dim, 1e-5) : norm_factor(x, r * stride, dim, 1e-5);
        for (int64_t c = 0; c < dim; c++)
            want.push_back((adds ? sums[r * dim + c] : x[r * stride + c]) * factor * weight[c]);
    }
    return (!adds || is_near("sum", sums, want_sums, 1)) && is_near("norm", normed, want, 1);
}

bool check_turn(Random& random, const Machine& machine, int type, int weight_type) {
    const int64_t tokens = pick(random, 0, 6), heads = pick(random, 1, 5), dim = pick(random, 2, 140);
    const int64_t turning = 2 * pick(random, 1, dim / 2), head_stride = dim + pick(random, 0, 3);
    const int64_t token_stride = heads * head_stride + pick(random, 0, 7);
    const bool has_norm = pick(random, 0, 1);
    Array x = draw(random, type, tokens ? (tokens - 1) * token_stride + (heads - 1) * head_stride + dim : 0);
    Array weight = draw(random, weight_type, heads * dim), out(type, tokens * heads * dim);
    Array cos = draw(random, type, tokens * turning), sin = draw(random, type, tokens * turning);
    const DsTurn call = {type, weight_type, tokens, heads, dim, turning, x.data(), token_stride, head_stride,
                         has_norm ? weight.data() : nullptr, cos.data(), sin.data(), out.data(), 1e-5f};
    if (!ds_turn(machine.context, machine.isa, &call)) return false;
    std::vector<double> want;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t first = t * token_stride + h * head_stride;
            const double factor = has_norm ? norm_factor(x, first, dim, 1e-5) : 1;
            const auto value = [&](int64_t c) { return x[first + c] * factor * (has_norm ? weight[h * dim + c] : 1); };
            for (int64_t c = 0; c < dim; c++) {
                const int64_t other = c < turning / 2 ? c + turning / 2 : c - turning / 2;
                want.push_back(c >= turning ? value(c)
                                            : value(c) * cos[t * turning + c] + value(other) * sin[t * turning + c]);
            }
        }
    return is_near("turned head", out, want, 4);
}

bool check_gate(Random& random, const Machine& machine, int type) {
    const int64_t rows = pick(random, 0, 9), dim = pick(random, 1, 200);
    const int activation = (int)pick(random, DS_SILU, DS_GELU_TANH);
    Array gate_up = draw(random, type, rows * 2 * dim), out(type, rows * dim);
    const DsGate call = {type, activation, rows, dim, gate_up.data(), out.data()};
    if (!ds_gate(machine.context, machine.isa, &call)) return false;
    std::vector<double> want;
    for (int64_t i = 0; i < rows * dim; i++) {
        const double x = gate_up[i / dim * 2 * dim + i % dim], up = gate_up[i / dim * 2 * dim + dim + i % dim];
        const double u = activation == DS_SILU ? x / 2 : sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
        want.push_back(x * 0.5 * (1 + tanh(u)) * up);
    }
    return is_near("gate", out, want, 1);
}

bool check_peaks(Random& random, const Machine& machine) {
    const int64_t rows = pick(random, 0, 5), dim = pick(random, 1, 300), stride = dim + pick(random, 0, 3);
    Array x = draw(random, DS_FLOAT32, rows ? (rows - 1) * stride + dim : 0);
    for (int64_t i = 0; i < x.count() && pick(random, 0, 1); i++) x.set(i, (float)pick(random, -3, 3));
    std::vector<bool> finite(rows, true);
    for (int64_t r = 0; r < rows; r++)
        if (pick(random, 0, 3) == 0) {
            x.set(r * stride + pick(random, 0, dim - 1), pick(random, 0, 1) ? NAN : pick(random, 0, 1) ? INFINITY : -INFINITY);
            finite[r] = false;
        }
    std::vector<int64_t> indexes(rows);
    std::vector<uint8_t> got(rows);
    const DsPeaks call = {rows, dim, (const float*)x.data(), stride, indexes.data(), got.data()};
    if (!ds_peaks(machine.context, machine.isa, &call)) return false;
    for (int64_t r = 0; r < rows; r++) {
        int64_t best = 0;
        for (int64_t c = 1; c < dim; c++)
            if (x[r * stride + c] > x[r * stride + best]) best = c;
        if (got[r] != finite[r] || (finite[r] && indexes[r] != best)) {
            fprintf(stderr, "peaks: row %ld is %d, largest at %ld, expected %ld\n", (long)r, got[r], (long)indexes[r], (long)best);
            return false;
        }
    }
    return true;
}

bool check_product(Random& random, const Machine& machine, int type) {
    if (!ds_product_rows(machine.isa, type)) return true;
    const int64_t rows = pick(random, 0, pick(random, 0, 7) ? 64 : 530), columns = pick(random, 1, rows > 64 ? 70 : 200);
    const int64_t step = type == DS_FLOAT32 ? 1 : 2, parts = pick(random, 1, pick(random, 0, 3) ? 100 : 700);
    const int64_t depth = pick(random, 0, 1) ? step * parts : (parts + 31) / 32 * 32, panels = (columns + 63) / 64;
    const int64_t panel_depth = depth + step * pick(random, 0, 9), stride = depth + pick(random, 0, 9);
    Array x = draw(random, type, rows ? (rows - 1) * stride + depth : 0), bias = draw(random, type, columns);
    Array weight = draw(random, type, panels * 64 * panel_depth), out(type, rows * columns);
    const bool has_bias = pick(random, 0, 1);
    const DsProduct call = {type, rows, columns, depth, x.data(), stride, weight.data(), panel_depth,
                            has_bias ? bias.data() : nullptr, out.data()};
    if (!ds_product(machine.context, machine.isa, &call)) return false;
    std::vector<double> want;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            double sum = has_bias ? bias[c] : 0;
            for (int64_t k = 0; k < depth; k++)
                sum += x[r * stride + k] * weight[c / 64 * 64 * panel_depth + k / step * step * 64 + c % 64 * step + k % step];
            want.push_back(sum);
        }
    return is_near("product", out, want, sqrt((double)depth));
}

double half_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, rest = bits & 1023;
    const double size = exponent ? ldexp(1024 + rest, exponent - 25) : ldexp(rest, -24);
    return bits >> 15 ? -size : size;
}

bool check_blocks(Random& random, const Machine& machine, int type) {
    const int64_t rows = pick(random, 0, pick(random, 0, 3) ? 20 : 300), columns = pick(random, 1, 100);
    const int64_t depth = 32 * pick(random, 1, pick(random, 0, 3) ? 5 : 20), stride = depth + pick(random, 0, 9);
    const int bits = pick(random, 0, 1) ? 4 : 8, run_len = pick(random, 0, 1) ? 16 : 32;
    const int scale_type = pick(random, 0, 1) ? DS_FLOAT16 : DS_FLOAT32, has_offsets = (int)pick(random, 0, 1);
    const int zero = has_offsets ? 0 : 1 << (bits - 1), scale_size = scale_type == DS_FLOAT16 ? 2 : 4;
    const int64_t panels = (columns + 31) / 32, runs = depth / run_len, scale_bytes = 32 * scale_size;
    const int64_t start = scale_bytes * (1 + has_offsets), size = start + 32 * run_len * bits / 8;
    std::vector<uint8_t> packed(panels * runs * size);
    std::vector<double> weight(columns * depth);
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t run = 0; run < runs; run++) {
            uint8_t* at = packed.data() + (panel * runs + run) * size;
            for (int64_t i = start; i < size; i++) at[i] = (uint8_t)pick(random, 0, 255);
            for (int64_t column = 0; column < 32; column++) {
                double of[2] = {};
                for (int i = 0; i < 1 + has_offsets; i++) {
                    uint8_t* to = at + i * scale_bytes + column * scale_size;
                    const uint16_t half = (uint16_t)(pick(random, 0, 1) << 15 | pick(random, 0x2000, 0x2fff));
                    const float full = (float)half_value(half);
                    memcpy(to, scale_size == 2 ? (const void*)&half : (const void*)&full, scale_size);
                    of[i] = full;
                }
                for (int64_t k = 0; k < run_len && panel * 32 + column < columns; k++) {
                    const int64_t word = bits == 8 ? k / 4 : k / 8;
                    const int byte = at[start + (word * 32 + column) * 4 + k % 4];
                    const int code = bits == 8 ? byte : byte >> (k % 8 < 4 ? 0 : 4) & 15;
                    weight[(panel * 32 + column) * depth + run * run_len + k] = of[0] * (code - zero) + of[1];
                }
            }
        }
    Array x = draw(random, type, rows ? (rows - 1) * stride + depth : 0), bias = draw(random, type, columns);
    const bool has_bias = pick(random, 0, 1), rounds = pick(random, 0, 1);
    const int64_t out_stride = columns + pick(random, 0, 4);
    Array out(type, rows ? (rows - 1) * out_stride + columns : 0);
    const DsBlocks blocks = {bits, run_len, scale_type, zero, has_offsets, columns, depth, packed.data()};
    const DsBlockProduct call = {type, rounds, rows, x.data(), stride, blocks, has_bias ? bias.data() : nullptr,
                                 out.data(), out_stride};
    if (!ds_block_product(machine.context, machine.isa, &call)) return false;
    for (int64_t r = 0; r < rows; r++) {
        std::vector<double> values(depth);
        for (int64_t k = 0; k < depth; k += 32) {
            float most = 0;
            for (int64_t j = k; j < k + 32; j++) most = std::max(most, (float)fabs(x[r * stride + j]));
            const float factor = 127.f / most;
            for (int64_t j = k; j < k + 32; j++) {
                const float value = (float)x[r * stride + j];
                values[j] = rounds ? nearbyintf(value * factor) * (double)(most / 127.f) : value;
            }
        }
        for (int64_t c = 0; c < columns; c++) {
            double want = has_bias ? bias[c] : 0, sizes = fabs(want);
            for (int64_t k = 0; k < depth; k++) {
                want += values[k] * weight[c * depth + k];
                sizes += fabs(values[k] * weight[c * depth + k]);
            }
            const double tolerance = (type == DS_FLOAT32 ? 1e-6 : 1e-2) * sizes + 1e-6, got = out[r * out_stride + c];
            if (!(fabs(got - want) <= tolerance)) {
                fprintf(stderr, "blocks: %g at %ld, %ld, expected %g\n", got, (long)r, (long)c, want);
                return false;
            }
        }
    }
    return true;
}

bool check_delta_rule(Random& random, const Machine& machine) {
    const int64_t key_heads = pick(random, 1, 3), heads = key_heads * pick(random, 1, 3), num_spans = pick(random, 0, 3);
    const int64_t key_dim = pick(random, 1, 40), value_dim = pick(random, 1, 150), states = num_spans + pick(random, 0, 2);
    std::vector<int64_t> spans;
    int64_t tokens = 0;
    for (int64_t i = 0; i < num_spans; i++) {
        const int64_t count = pick(random, 0, 5);
        spans.insert(spans.end(), {num_spans - 1 - i, tokens, count});
        tokens += count;
    }
    Array q = draw(random, DS_FLOAT32, tokens * key_heads * key_dim), k = draw(random, DS_FLOAT32, q.count());
    Array v = draw(random, DS_FLOAT32, tokens * heads * value_dim), out(DS_FLOAT32, v.count());
    Array decay = draw(random, DS_FLOAT32, tokens * heads), beta = draw(random, DS_FLOAT32, tokens * heads);
    for (int64_t i = 0; i < k.count(); i++) k.set(i, (float)(k[i] / sqrt((double)key_dim)));
    for (int64_t i = 0; i < decay.count(); i++) {
        decay.set(i, (float)(1 / (1 + exp(decay[i]))));
        beta.set(i, (float)(1 / (1 + exp(beta[i]))));
    }
    Array state = draw(random, DS_FLOAT32, states * heads * key_dim * value_dim);
    std::vector<double> kept, want(v.count());
    for (int64_t i = 0; i < state.count(); i++) kept.push_back(state[i]);
    const DsDeltaRule call = {tokens, states, key_heads, heads, key_dim, value_dim, (const float*)q.data(),
                              (const float*)k.data(), (const float*)v.data(), (const float*)decay.data(),
                              (const float*)beta.data(), (float*)out.data(), (float*)state.data(), spans.data(), num_spans};
    if (!ds_delta_rule(machine.context, machine.isa, &call)) return false;
    for (int64_t i = 0; i < num_spans; i++)
        for (int64_t t = spans[3 * i + 1]; t < spans[3 * i + 1] + spans[3 * i + 2]; t++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t c = 0; c < value_dim; c++) {
                    double* at = &kept[(spans[3 * i] * heads + h) * key_dim * value_dim + c];
                    const int64_t key = (t * key_heads + h / (heads / key_heads)) * key_dim;
                    double expected = 0, read = 0;
                    for (int64_t d = 0; d < key_dim; d++) expected += k[key + d] * (at[d * value_dim] *= decay[t * heads + h]);
                    const double added = (v[(t * heads + h) * value_dim + c] - expected) * beta[t * heads + h];
                    for (int64_t d = 0; d < key_dim; d++) read += q[key + d] * (at[d * value_dim] += k[key + d] * added);
                    want[(t * heads + h) * value_dim + c] = read;
                }
    return is_near("delta rule", out, want, 10) && is_near("state", state, kept, 10);
}

bool check(uint64_t seed, const Machine& machine) {
    Random random(seed);
    const int type = (int)pick(random, DS_FLOAT32, DS_BFLOAT16);
    const int weight_type = pick(random, 0, 1) ? (int)DS_FLOAT32 : type;
    return check_norm(random, machine, type, weight_type) && check_turn(random, machine, type, weight_type) &&
           check_gate(random, machine, type) && check_product(random, machine, type) &&
           check_blocks(random, machine, type) && check_peaks(random, machine) &&
           check_delta_rule(random, machine);
}

}  // namespace

int main(int num_args, char** args) {
    const int count = num_args > 1 ? atoi(args[1]) : 10, first = num_args > 2 ? atoi(args[2]) : 0;
    DsContext* context = ds_context_new(2);
    for (int seed = first; seed < first + count; seed++) {
        for (int isa = 0; isa < ds_num_isas(); isa++) {
            if (ds_isa_name(isa) == nullptr || check((uint64_t)seed, {context, isa})) continue;
            fprintf(stderr, "seed %d, %s: wrong\n", seed, ds_isa_name(isa));
            return 1;
        }
    }
    ds_context_free(context);
    printf("%d batches\n", count);
    return 0;
}
