// Random batches through the C ABI of the native library against plain attention in double precision. Every array has
// exactly the size that the library may touch, so that a sanitizer sees any step beyond. fuzz_attention SEEDS [FIRST [COMPARED]]
// compares the first COMPARED batches, by default all; the others must be alike with any number of threads.
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

template <class T> T any_of(Random& random, std::vector<T> values) {
    return values[pick(random, 0, (int64_t)values.size() - 1)];
}

int bytes_of(int type) { return type == DS_FLOAT32 ? 4 : type == DS_FLOAT8 ? 1 : 2; }

double value_of(int type, const uint8_t* at) {
    if (type == DS_FLOAT32) {
        float x;
        memcpy(&x, at, 4);
        return x;
    }
    if (type == DS_FLOAT8) {
        const int exponent = *at >> 3 & 15, fraction = *at & 7;
        const double size = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
        return *at & 0x80 ? -size : size;
    }
    uint16_t bits;
    memcpy(&bits, at, 2);
    if (type == DS_BFLOAT16) {
        const uint32_t wide = (uint32_t)bits << 16;
        float x;
        memcpy(&x, &wide, 4);
        return x;
    }
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return bits & 0x8000 ? -size : size;
}

// Bits of a number of moderate size.
void put_random(Random& random, int type, uint8_t* at) {
    const float x = (float)std::normal_distribution<double>(0, 1)(random);
    if (type == DS_FLOAT32) {
        memcpy(at, &x, 4);
    } else if (type == DS_FLOAT8) {
        *at = (uint8_t)(pick(random, 0, 0x3f) | (x < 0 ? 0x80 : 0));
    } else if (type == DS_BFLOAT16) {
        uint32_t bits;
        memcpy(&bits, &x, 4);
        const uint16_t high = (uint16_t)(bits >> 16);
        memcpy(at, &high, 2);
    } else {
        const uint16_t bits = (uint16_t)(pick(random, 0, 0x3fff) | (x < 0 ? 0x8000 : 0));
        memcpy(at, &bits, 2);
    }
}

struct World {
    DsWork work{};
    DsAttend call{};
    int num_tokens = 0, num_heads = 0;
    std::vector<int32_t> queries, runs, members, table;
    std::vector<uint8_t> q, out, pages;
    std::vector<float> sinks;
    bool is_latent = false;
};

void make_batch(Random& random, World& w) {
    const int split = w.work.split_tokens, page_size = w.work.page_size;
    const int num_lines = (int)pick(random, 1, 6), max_len = (int)pick(random, 1, 300);
    const int64_t max_pages = (max_len + page_size - 1) / page_size, common = pick(random, 0, max_len / split) * split;
    std::vector<int32_t> free_pages;
    for (int i = 0; i < num_lines * max_pages; i++) free_pages.push_back(i);
    std::shuffle(free_pages.begin(), free_pages.end(), random);
    w.table = free_pages;
    std::vector<int32_t> readers;
    for (int line = 0; line < num_lines; line++) {
        for (int64_t page = 0; line > 0 && page < common / page_size; page++)
            w.table[line * max_pages + page] = w.table[page];
        const int end = (int)pick(random, 1, max_len), len = (int)any_of<int64_t>(random, {1, 1, pick(random, 1, end)});
        w.queries.insert(w.queries.end(), {line, end - len, len});
        w.num_tokens += len;
        if (end - len >= common && len <= 16) readers.push_back(line);
    }
    if (common > 0 && readers.size() > 1) {
        const int cut = (int)pick(random, 0, common / split) * split;
        for (const auto& [start, end] : {std::pair<int, int>{0, cut}, std::pair<int, int>{cut, (int)common}}) {
            if (start == end) continue;
            w.runs.insert(w.runs.end(), {start, end, (int32_t)readers.size()});
            w.members.insert(w.members.end(), readers.begin(), readers.end());
        }
    }
    w.work.table_stride = max_pages;
    w.work.num_queries = num_lines;
    w.work.num_runs = (int)w.runs.size() / 3;
}

// What no query has positions for is not a number.
void fill_pages(Random& random, World& w) {
    const int size = bytes_of(w.call.kv_type);
    w.pages.assign(w.call.page_stride * w.table.size(), 0xff);
    for (int i = 0; i < w.work.num_queries; i++) {
        const int32_t* query = &w.queries[3 * i];
        for (int position = 0; position < query[1] + query[2]; position++)
            for (int64_t plane = 0; plane < w.call.page_stride; plane += w.call.token_stride * w.work.page_size) {
                uint8_t* row = w.pages.data() + w.table[query[0] * w.work.table_stride + position / w.work.page_size] *
                                                    w.call.page_stride + plane + position % w.work.page_size * w.call.token_stride;
                for (int64_t at = 0; at < w.call.token_stride; at += size) put_random(random, w.call.kv_type, row + at);
            }
    }
}

World make_world(Random& random) {
    World w;
    w.work.page_size = (int)any_of<int64_t>(random, {1, 2, 4, 8, 16, 32, 64, 128});
    w.work.split_tokens = w.work.page_size * (int)any_of<int64_t>(random, {1, 2, 4});
    w.work.window_len = any_of<int32_t>(random, {INT32_MAX, INT32_MAX, 1, 7, 40, 129});
    w.work.long_len = any_of<int32_t>(random, {17, INT32_MAX});
    w.work.num_kv_heads = (int)pick(random, 1, 3);
    w.work.group_size = any_of<int32_t>(random, {1, 2, 3, 4, 7, 8});
    w.work.head_dim = any_of<int32_t>(random, {8, 32, 40, 64, 80, 96, 128, 256});
    w.is_latent = pick(random, 0, 4) == 0;
    w.work.value_dim = w.is_latent ? w.work.head_dim - 8 * (int)pick(random, 0, 0 + (w.work.head_dim > 8)) : w.work.head_dim;
    make_batch(random, w);
    w.num_heads = w.work.num_kv_heads * w.work.group_size;
    const bool is_bfloat16 = pick(random, 0, 3) == 0;  // both: some instruction sets multiply pairs of them
    const int q_type =
        is_bfloat16 ? DS_BFLOAT16 : any_of<int32_t>(random, {DS_FLOAT32, DS_FLOAT32, DS_BFLOAT16, DS_FLOAT16});
    const int kv_type =
        is_bfloat16 ? DS_BFLOAT16 : any_of<int32_t>(random, {DS_FLOAT32, DS_BFLOAT16, DS_FLOAT16, DS_FLOAT8});
    const int64_t row = (int64_t)w.work.head_dim * bytes_of(kv_type), plane = row * w.work.page_size;
    const int planes = w.is_latent ? 1 : 2;
    w.call.q_type = q_type;
    w.call.kv_type = kv_type;
    w.call.token_stride = row;
    w.call.head_stride = planes * plane;
    w.call.page_stride = w.call.head_stride * w.work.num_kv_heads;
    fill_pages(random, w);
    w.q.resize((size_t)w.num_tokens * w.num_heads * w.work.head_dim * bytes_of(q_type));
    for (size_t i = 0; i < w.q.size(); i += bytes_of(q_type)) put_random(random, q_type, &w.q[i]);
    w.out.resize((size_t)w.num_tokens * w.num_heads * w.work.value_dim * bytes_of(q_type));
    if (pick(random, 0, 1))
        for (int i = 0; i < w.num_heads; i++) w.sinks.push_back((float)pick(random, -3, 3));
    w.call.q_token_stride = (int64_t)w.num_heads * w.work.head_dim;
    w.call.q_head_stride = w.work.head_dim;
    w.call.scale = 1 / sqrtf((float)w.work.head_dim);
    return w;
}

void point(World& w) {
    w.work.queries = w.queries.data();
    w.work.runs = w.runs.data();
    w.work.members = w.members.data();
    w.work.table = w.table.data();
    w.call.q = w.q.data();
    w.call.out = w.out.data();
    w.call.keys = w.pages.data();
    w.call.values = w.pages.data() + (w.is_latent ? 0 : w.call.token_stride * w.work.page_size);
    w.call.sinks = w.sinks.empty() ? nullptr : w.sinks.data();
}

const uint8_t* key_at(const World& w, int line, int64_t position, int kv_head) {
    const int64_t page = w.table[line * w.work.table_stride + position / w.work.page_size];
    return w.pages.data() + page * w.call.page_stride + kv_head * w.call.head_stride +
           position % w.work.page_size * w.call.token_stride;
}

// Plain attention of one row of one head.
void append_row(const World& w, int line, int64_t position, int64_t token, int head, std::vector<double>& want) {
    const int dim = w.work.head_dim, kv_head = head / w.work.group_size, q_bytes = bytes_of(w.call.q_type);
    const int kv_bytes = bytes_of(w.call.kv_type);
    const int64_t values = w.call.values - w.call.keys, first = std::max<int64_t>(0, position + 1 - w.work.window_len);
    std::vector<double> query(dim), scores, sum(w.work.value_dim);
    for (int d = 0; d < dim; d++)
        query[d] = value_of(w.call.q_type, &w.q[((token * w.num_heads + head) * dim + d) * q_bytes]);
    double top = w.sinks.empty() ? -INFINITY : w.sinks[head], total = 0;
    for (int64_t key = first; key <= position; key++) {
        double score = 0;
        for (int d = 0; d < dim; d++)
            score += query[d] * value_of(w.call.kv_type, key_at(w, line, key, kv_head) + d * kv_bytes);
        scores.push_back(score * w.call.scale);
        top = std::max(top, scores.back());
    }
    if (!w.sinks.empty()) total = exp(w.sinks[head] - top);
    for (int64_t key = first; key <= position; key++) {
        const double weight = exp(scores[key - first] - top);
        total += weight;
        for (int d = 0; d < w.work.value_dim; d++)
            sum[d] += weight * value_of(w.call.kv_type, key_at(w, line, key, kv_head) + values + d * kv_bytes);
    }
    for (double value : sum) want.push_back(value / total);
}

// Plain attention, in the order of the result.
std::vector<double> plain_attention(const World& w) {
    std::vector<double> want;
    int64_t token = 0;
    for (int i = 0; i < w.work.num_queries; i++) {
        const int32_t* query = &w.queries[3 * i];
        for (int t = 0; t < query[2]; t++, token++)
            for (int head = 0; head < w.num_heads; head++) append_row(w, query[0], query[1] + t, token, head, want);
    }
    return want;
}

// Largest difference of a row from what is wanted, relative to the size of its values.
double largest_error(const World& w, const std::vector<double>& want) {
    double error = 0;
    for (size_t row = 0; row < want.size(); row += w.work.value_dim) {
        double difference = 0, size = 1;
        for (size_t i = row; i < row + w.work.value_dim; i++) {
            const double got = value_of(w.call.q_type, &w.out[i * bytes_of(w.call.q_type)]);
            size = std::max(size, fabs(want[i]));
            difference = got == got ? std::max(difference, fabs(got - want[i])) : INFINITY;
        }
        error = std::max(error, difference / size);
    }
    return error;
}

bool check(World& w, const std::vector<double>& want, int isa, int num_threads, std::vector<uint8_t>* bits) {
    const double tolerance = w.call.q_type == DS_BFLOAT16 ? 1e-2 : w.call.q_type == DS_FLOAT16 ? 2e-3 : 5e-5;
    std::fill(w.out.begin(), w.out.end(), 0);
    DsContext* context = ds_context_new(num_threads);
    DsPlan* plan = ds_plan_new(&w.work, num_threads);
    const bool is_done = ds_attend(context, plan, isa, &w.call);
    ds_plan_free(plan);
    ds_context_free(context);
    if (!is_done) return false;
    if (!bits->empty()) return *bits == w.out;  // by other threads: to the bit
    *bits = w.out;
    const double error = largest_error(w, want);
    if (error > tolerance) fprintf(stderr, "%s: error %g\n", ds_isa_name(isa), error);
    return error <= tolerance;
}

}  // namespace

int main(int num_args, char** args) {
    const int count = num_args > 1 ? atoi(args[1]) : 10, first = num_args > 2 ? atoi(args[2]) : 0;
    const int num_compared = num_args > 3 ? atoi(args[3]) : count;
    for (int seed = first; seed < first + count; seed++) {
        Random random((uint64_t)seed);
        World world = make_world(random);
        point(world);
        std::vector<double> want;
        if (seed - first < num_compared) want = plain_attention(world);
        for (int isa = 0; isa < ds_num_isas(); isa++) {
            if (ds_isa_name(isa) == nullptr) continue;
            std::vector<uint8_t> bits;
            for (int num_threads : {1, 3}) {
                if (check(world, want, isa, num_threads, &bits)) continue;
                fprintf(stderr, "seed %d, %s, %d threads: wrong\n", seed, ds_isa_name(isa), num_threads);
                return 1;
            }
        }
    }
    printf("%d batches\n", count);
    return 0;
}
