// Attention over pages: scores, softmax and values of one block of keys after the other, in place.
//
// All arithmetic is float32. Lanes are channels: a key is read as it lies, and meets up to four rows in registers. How many
// rows that are changes no sum: products of a score are added along the channels, weighted values along the keys, each in
// an order of its own.
#include "attention_kernel.h"
#include "vectors.h"

#define DS_JOIN(a, b) a##b
#define DS_NAME(prefix, isa) DS_JOIN(prefix, isa)

namespace deltaserve {

namespace {

constexpr int kSums = kLanes == 16 ? 16 : 8;  // accumulators that the registers hold
constexpr float kNoScore = -1e30f;            // largest score of no key
constexpr float kHidden = -__builtin_inff();
constexpr float kLog2E = 1.44269504f;

DS_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
DS_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Rows of one task, and what is known of them so far.
struct Rows {
    float *q, *values, *total;                     // [row][padded dim]: of the split, of all splits before
    float *top, *sum, *total_top, *total_sum;      // [row]
    float* scores;                                 // [kTileRows][kBlockKeys]
    float *packed_keys, *packed_values;            // [kBlockKeys][padded dim]
    int dim, value_dim;                            // padded
};

Rows rows_in(const Scratch& scratch, int max_rows, int dim, int value_dim) {
    Rows rows;
    rows.dim = padded(dim);
    rows.value_dim = padded(value_dim);
    float* at = scratch.rows;
    const auto take = [&at](int64_t count) {
        float* taken = at;
        at += count;
        return taken;
    };
    rows.q = take((int64_t)max_rows * rows.dim);
    rows.values = take((int64_t)max_rows * rows.value_dim);
    rows.total = take((int64_t)max_rows * rows.value_dim);
    rows.packed_keys = take(kBlockKeys * rows.dim);
    rows.packed_values = take(kBlockKeys * rows.value_dim);
    rows.scores = take(kTileRows * kBlockKeys);
    rows.top = take(max_rows);
    rows.sum = take(max_rows);
    rows.total_top = take(max_rows);
    rows.total_sum = take(max_rows);
    return rows;
}

float number(const void* values, int type, int64_t index) {
    if (type == DS_FLOAT32) return ((const float*)values)[index];
    const uint16_t bits = ((const uint16_t*)values)[index];
    return type == DS_BFLOAT16 ? from_bfloat16(bits) : from_float16(bits);
}

void put_number(void* values, int type, int64_t index, float x) {
    if (type == DS_FLOAT32)
        ((float*)values)[index] = x;
    else
        ((uint16_t*)values)[index] = type == DS_BFLOAT16 ? to_bfloat16(x) : to_float16(x);
}

void read_query(const DsAttend& call, int64_t token, int head, int dim, float* to, int padded_dim) {
    const int64_t from = token * call.q_token_stride + head * call.q_head_stride;
    for (int d = 0; d < dim; d++) to[d] = number(call.q, call.q_type, from + d);
    for (int d = dim; d < padded_dim; d++) to[d] = 0;
}

DS_INLINE void clear(float* values, float* top, float* sum, int dim) {
    for (int d = 0; d < dim; d += kLanes) store(values + d, Vec{});
    *top = kNoScore;
    *sum = 0;
}

// The total so far and the next partial result.
void add_part(float* total, float* total_top, float* total_sum, const float* part, float top, float sum, int dim) {
    const float highest = *total_top > top ? *total_top : top;
    const float old_weight = exp2_of(*total_top - highest), weight = exp2_of(top - highest);
    for (int d = 0; d < dim; d += kLanes)
        store(total + d, multiply_add(load(total + d), all(old_weight), load(part + d) * all(weight)));
    *total_sum = *total_sum * old_weight + sum * weight;
    *total_top = highest;
}

void write_result(const DsAttend& call, const DsWork& work, int64_t token, int head, const float* total, float top,
                  float sum) {
    float weight = 1;
    if (call.sinks != nullptr) {
        const float sink = call.sinks[head] * kLog2E, highest = sink > top ? sink : top;
        weight = exp2_of(top - highest);
        sum = sum * weight + exp2_of(sink - highest);
    }
    const float factor = weight / sum;
    const int64_t to = (token * work.num_kv_heads * work.group_size + head) * work.value_dim;
    for (int d = 0; d < work.value_dim; d++) put_number(call.out, call.q_type, to + d, total[d] * factor);
}

// A block of keys: where each lies. Index 0 is the block's first position, also where nobody sees it.
struct Block {
    int64_t start;
    int first, end;  // that some row sees
    const uint8_t *keys[kBlockKeys], *values[kBlockKeys];  // of others: any readable address
};

// Pages lie anywhere, so the machine does not guess which comes next.
DS_INLINE void fetch(const uint8_t* from, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

void locate(Block& block, const PlanView& plan, const DsAttend& call, const Task& task, int64_t start, int64_t end) {
    const int page_size = plan.work->page_size;
    const int32_t* pages = plan.pages + plan.segments[task.segment].pages;
    const int64_t first_key = most(start, task.start), end_key = least(end, task.end);
    block.start = start;
    block.first = (int)(first_key - start);
    block.end = (int)(end_key - start);
    int64_t page = first_key / page_size;
    int in_page = (int)(first_key % page_size);
    for (int j = block.first; j < block.end;) {
        int64_t at = pages[page] * call.page_stride + task.head * call.head_stride + in_page * call.token_stride;
        for (; j < block.end && in_page < page_size; j++, in_page++, at += call.token_stride) {
            block.keys[j] = call.keys + at;
            block.values[j] = call.values + at;
        }
        page++;
        in_page = 0;
    }
    for (int j = 0; j < kBlockKeys; j++) {
        if (j == block.first) j = block.end;
        if (j == kBlockKeys) break;
        block.keys[j] = block.keys[block.first];
        block.values[j] = block.values[block.first];
    }
}

template <class Element> void unpack(const uint8_t* from, int dim, float* to, int padded_dim) {
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(to + d, Element::load(from + d * Element::kBytes));
    if (d < dim) {
        uint8_t rest[kLanes * Element::kBytes] = {};
        memcpy(rest, from + d * Element::kBytes, (dim - d) * Element::kBytes);
        store(to + d, Element::load(rest));
        d += kLanes;
    }
    for (; d < padded_dim; d += kLanes) store(to + d, Vec{});
}

template <class Element> void pack(Block& block, const Block* next, const DsWork& work, const Rows& rows) {
    for (int j = block.first; j < block.end; j++) {
        float* key = rows.packed_keys + (int64_t)j * rows.dim;
        if (next != nullptr) {
            fetch(next->keys[j], work.head_dim * Element::kBytes);
            fetch(next->values[j], work.value_dim * Element::kBytes);
        }
        unpack<Element>(block.keys[j], work.head_dim, key, rows.dim);
        if (block.values[j] == block.keys[j]) {  // the values are the first channels of the key
            block.values[j] = (const uint8_t*)key;
        } else {
            float* value = rows.packed_values + (int64_t)j * rows.value_dim;
            unpack<Element>(block.values[j], work.value_dim, value, rows.value_dim);
            block.values[j] = (const uint8_t*)value;
        }
        block.keys[j] = (const uint8_t*)key;
    }
}

// Keys [first, end) of the block that any of the kRows rows sees.
template <class Element, int kRows>
DS_INLINE void score(const Block& block, const Block* next, int first, int end, const float* q, int dim, float scale,
                     float* scores) {
    constexpr int kKeys = kSums / kRows;
    const Vec factor = all(scale);
    for (int j = first / kKeys * kKeys; j < end; j += kKeys) {
        const uint8_t* keys[kKeys];
        for (int k = 0; k < kKeys; k++) {
            const int index = j + k < first ? first : j + k < end ? j + k : end - 1;
            keys[k] = block.keys[index];
            if (next != nullptr) fetch(next->keys[j + k], dim * Element::kBytes);
        }
        Vec sums[kSums] = {};
        for (int d = 0; d < dim; d += kLanes) {
            Vec key[kKeys];
            for (int k = 0; k < kKeys; k++) key[k] = Element::load(keys[k] + d * Element::kBytes);
            for (int r = 0; r < kRows; r++) {
                const Vec of_row = load(q + r * dim + d);
                for (int k = 0; k < kKeys; k++) sums[r * kKeys + k] = multiply_add(of_row, key[k], sums[r * kKeys + k]);
            }
        }
        float found[kSums];
        for (int i = 0; i < kSums; i += kLanes) store(found + i, sums_of(sums + i) * factor);
        for (int r = 0; r < kRows; r++) memcpy(scores + r * kBlockKeys + j, found + r * kKeys, sizeof(float) * kKeys);
    }
}

// Scores to weights. Returns the factor of what the row had before.
DS_INLINE float weigh(float* scores, int first, int end, float* top, float* sum) {
    for (int j = 0; j < first; j++) scores[j] = kHidden;
    for (int j = end; j < kBlockKeys; j++) scores[j] = kHidden;
    Vec highest = load(scores);
    for (int j = kLanes; j < kBlockKeys; j += kLanes) highest = larger(load(scores + j), highest);
    const float found = largest_of(highest), new_top = found > *top ? found : *top;
    Vec total = Vec{};
    for (int j = 0; j < kBlockKeys; j += kLanes) {
        const Vec weights = exp2_of(load(scores + j) - all(new_top));
        store(scores + j, weights);
        total = total + weights;
    }
    const float factor = exp2_of(*top - new_top);
    *sum = *sum * factor + sum_of(total);
    *top = new_top;
    return factor;
}

template <class Element, int kRows, int kVectors>
DS_INLINE void add_channels(const Block& block, const Block* next, int first, int end, const float* weights,
                            const float* factors, float* values, int value_dim, int d) {
    Vec sums[kRows][kVectors];
    for (int r = 0; r < kRows; r++)
        for (int c = 0; c < kVectors; c++)
            sums[r][c] = load(values + r * value_dim + d + c * kLanes) * all(factors[r]);
    for (int j = first; j < end; j++) {
        if (next != nullptr && d == 0) fetch(next->values[j], value_dim * Element::kBytes);
        Vec value[kVectors];
        for (int c = 0; c < kVectors; c++)
            value[c] = Element::load(block.values[j] + (d + c * kLanes) * Element::kBytes);
        for (int r = 0; r < kRows; r++) {
            const Vec weight = all(weights[r * kBlockKeys + j]);
            for (int c = 0; c < kVectors; c++) sums[r][c] = multiply_add(weight, value[c], sums[r][c]);
        }
    }
    for (int r = 0; r < kRows; r++)
        for (int c = 0; c < kVectors; c++) store(values + r * value_dim + d + c * kLanes, sums[r][c]);
}

template <class Element, int kRows>
DS_INLINE void add_values(const Block& block, const Block* next, int first, int end, const float* weights,
                          const float* factors, float* values, int value_dim) {
    constexpr int kMost = kSums / kRows < 8 ? kSums / kRows : 8;
    int d = 0;
    for (; d + kMost * kLanes <= value_dim; d += kMost * kLanes)
        add_channels<Element, kRows, kMost>(block, next, first, end, weights, factors, values, value_dim, d);
    if (kMost > 4)
        for (; d + 4 * kLanes <= value_dim; d += 4 * kLanes)
            add_channels<Element, kRows, 4>(block, next, first, end, weights, factors, values, value_dim, d);
    for (; d < value_dim; d += kLanes)
        add_channels<Element, kRows, 1>(block, next, first, end, weights, factors, values, value_dim, d);
}

// Rows [row, row + kRows) of the task meet a block.
template <class Element, int kRows>
void meet(const Block& block, const Block* next, const PlanView& plan, const Task& task, float scale, const Rows& rows, int row) {
    const Segment& segment = plan.segments[task.segment];
    int firsts[kRows], ends[kRows], first = kBlockKeys, end = 0;
    for (int r = 0; r < kRows; r++) {
        const TokenRows& token = plan.rows[segment.rows + (task.first + row + r) / plan.work->group_size];
        firsts[r] = (int)least(most(token.first_key - block.start, block.first), kBlockKeys);
        ends[r] = (int)most(least(token.end_key - block.start, block.end), firsts[r]);
        if (firsts[r] == ends[r]) continue;
        first = firsts[r] < first ? firsts[r] : first;
        end = ends[r] > end ? ends[r] : end;
    }
    if (first >= end) return;
    score<Element, kRows>(block, next, first, end, rows.q + (int64_t)row * rows.dim, rows.dim, scale, rows.scores);
    float factors[kRows];
    for (int r = 0; r < kRows; r++)
        factors[r] = weigh(rows.scores + r * kBlockKeys, firsts[r], ends[r], rows.top + row + r, rows.sum + row + r);
    add_values<Element, kRows>(block, next, first, end, rows.scores, factors,
                               rows.values + (int64_t)row * rows.value_dim, rows.value_dim);
}

template <class Element>
void meet_all(const Block& block, const Block* next, const PlanView& plan, const Task& task, float scale, const Rows& rows) {
    int row = 0;
    for (; row + 4 <= task.num_rows; row += 4, next = nullptr) meet<Element, 4>(block, next, plan, task, scale, rows, row);
    for (; row + 2 <= task.num_rows; row += 2, next = nullptr) meet<Element, 2>(block, next, plan, task, scale, rows, row);
    for (; row < task.num_rows; row++, next = nullptr) meet<Element, 1>(block, next, plan, task, scale, rows, row);
}

// All rows of the task have met a split: its partial results are kept, or added to the total.
void end_split(const PlanView& plan, const Task& task, const Scratch& scratch, const Rows& rows, int64_t split) {
    const Segment& segment = plan.segments[task.segment];
    const int group = plan.work->group_size, num_heads = plan.work->num_kv_heads * group;
    const int64_t since = split - segment.start / plan.work->split_tokens;
    for (int row = 0; row < task.num_rows; row++) {
        float* values = rows.values + (int64_t)row * rows.value_dim;
        if (segment.keeps_parts) {
            const TokenRows& token = plan.rows[segment.rows + (task.first + row) / group];
            const int head = task.head * group + (task.first + row) % group;
            const int64_t at = (token.first_part + since) * num_heads + head;
            memcpy(scratch.parts + at * rows.value_dim, values, sizeof(float) * rows.value_dim);
            scratch.part_scales[2 * at] = rows.top[row];
            scratch.part_scales[2 * at + 1] = rows.sum[row];
        } else {
            add_part(rows.total + (int64_t)row * rows.value_dim, rows.total_top + row, rows.total_sum + row, values,
                     rows.top[row], rows.sum[row], rows.value_dim);
        }
        clear(values, rows.top + row, rows.sum + row, rows.value_dim);
    }
}

void begin_rows(const PlanView& plan, const DsAttend& call, const Task& task, const Rows& rows) {
    const Segment& segment = plan.segments[task.segment];
    const int group = plan.work->group_size;
    for (int row = 0; row < task.num_rows; row++) {
        const TokenRows& token = plan.rows[segment.rows + (task.first + row) / group];
        const int head = task.head * group + (task.first + row) % group;
        read_query(call, token.token, head, plan.work->head_dim, rows.q + (int64_t)row * rows.dim, rows.dim);
        clear(rows.values + (int64_t)row * rows.value_dim, rows.top + row, rows.sum + row, rows.value_dim);
        clear(rows.total + (int64_t)row * rows.value_dim, rows.total_top + row, rows.total_sum + row, rows.value_dim);
    }
}

void end_rows(const PlanView& plan, const DsAttend& call, const Task& task, const Rows& rows) {
    const Segment& segment = plan.segments[task.segment];
    const int group = plan.work->group_size;
    for (int row = 0; row < task.num_rows; row++) {
        const TokenRows& token = plan.rows[segment.rows + (task.first + row) / group];
        const int head = task.head * group + (task.first + row) % group;
        write_result(call, *plan.work, token.token, head, rows.total + (int64_t)row * rows.value_dim,
                     rows.total_top[row], rows.total_sum[row]);
    }
}

template <class Element>
void run(const PlanView& plan, const DsAttend& call, const Task& task, const Scratch& scratch) {
    const DsWork& work = *plan.work;
    const Rows rows = rows_in(scratch, plan.max_rows, work.head_dim, work.value_dim);
    const bool fits_vectors = work.head_dim == rows.dim && work.value_dim == rows.value_dim;
    // Many rows would convert a key again and again.
    const bool packs = !fits_vectors || (Element::kBytes < 4 && task.num_rows > kTileRows);
    const float scale = call.scale * kLog2E;
    begin_rows(plan, call, task, rows);
    const int64_t segment_end = plan.segments[task.segment].end;
    const int64_t first_split = plan.segments[task.segment].start / work.split_tokens;
    Block blocks[2];
    Block *block = &blocks[0], *next = &blocks[1];
    bool is_located = false;
    for (int64_t split = first_split; split * work.split_tokens < segment_end; split++) {
        const int64_t split_end = least((split + 1) * work.split_tokens, segment_end);
        for (int64_t start = split * work.split_tokens; start < split_end; start += kBlockKeys) {
            const int64_t end = least(start + kBlockKeys, split_end);
            if (end <= task.start || start >= task.end) continue;
            if (!is_located) locate(*block, plan, call, task, start, end);
            const int64_t next_end = least(end + kBlockKeys, end < split_end ? split_end : end + work.split_tokens);
            is_located = end < task.end;
            if (is_located) locate(*next, plan, call, task, end, least(next_end, segment_end));
            const Block* ahead = is_located ? next : nullptr;
            if (packs) {
                pack<Element>(*block, ahead, work, rows);
                meet_all<Float32>(*block, nullptr, plan, task, scale, rows);
            } else {
                meet_all<Element>(*block, ahead, plan, task, scale, rows);
            }
            Block* done = block;
            block = next;
            next = done;
        }
        end_split(plan, task, scratch, rows, split);
    }
    if (!plan.segments[task.segment].keeps_parts) end_rows(plan, call, task, rows);
}

void run_task(const PlanView& plan, const DsAttend& call, const Task& task, const Scratch& scratch) {
    switch (call.kv_type) {
        case DS_FLOAT32: return run<Float32>(plan, call, task, scratch);
        case DS_BFLOAT16: return run<BFloat16>(plan, call, task, scratch);
        case DS_FLOAT16: return run<Float16>(plan, call, task, scratch);
        default: return run<Float8>(plan, call, task, scratch);
    }
}

void merge(const PlanView& plan, const DsAttend& call, const Merge& merge, const Scratch& scratch) {
    const DsWork& work = *plan.work;
    const int num_heads = work.num_kv_heads * work.group_size, value_dim = padded(work.value_dim);
    const Rows rows = rows_in(scratch, plan.max_rows, work.head_dim, work.value_dim);
    for (int head = 0; head < num_heads; head++) {
        clear(rows.total, rows.total_top, rows.total_sum, value_dim);
        for (int64_t part = merge.first_part; part < merge.first_part + merge.num_parts; part++) {
            const int64_t at = part * num_heads + head;
            add_part(rows.total, rows.total_top, rows.total_sum, scratch.parts + at * value_dim,
                     scratch.part_scales[2 * at], scratch.part_scales[2 * at + 1], value_dim);
        }
        write_result(call, work, merge.token, head, rows.total, *rows.total_top, *rows.total_sum);
    }
}

}  // namespace

extern const AttentionKernel DS_NAME(attention_, DELTASERVE_ISA) = {run_task, merge};

}  // namespace deltaserve
