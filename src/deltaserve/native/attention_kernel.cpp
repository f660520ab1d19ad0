// Attention over pages: scores, softmax and values of one block of keys after the other, in place.
//
// All arithmetic is float32. A score is the sum of as many chains as a vector has lanes: chain l adds the products of
// channels l, l + kLanes and so on, and the chains' sums meet in a fixed order. Few rows read keys as they lie, their lanes
// are chains; for many, keys of a block are laid out anew, their lanes are keys. Weighted values are added from the first
// key to the last. So neither the number of rows nor the way they go changes a bit.
#include "attention_kernel.h"
#include "vectors.h"

#define DS_JOIN(a, b) a##b
#define DS_NAME(prefix, isa) DS_JOIN(prefix, isa)

namespace deltaserve {

namespace {

constexpr int kSums = kLanes == 16 ? 24 : 12;        // accumulators that the registers hold
constexpr int kTileVectors = kSums / kTileRows;
constexpr int kFewSums = kLanes == 16 ? 16 : 8;  // accumulators whose lanes are added up
constexpr int kFewRows = 8;                      // that read keys in place
constexpr int kLevels = kLanes == 16 ? 5 : kLanes == 8 ? 4 : 3;
constexpr float kNoScore = -1e30f;            // largest score of no key
constexpr float kHidden = -__builtin_inff();
constexpr float kLog2E = 1.44269504f;

template <int kCount> struct Count {
    static constexpr int value = kCount;
};

DS_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
DS_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Rows of one task, and what is known of them so far.
struct Rows {
    float *q, *values, *total;                     // [row][padded dim]: of the split, of all splits before
    float *top, *sum, *total_top, *total_sum;      // [row]
    float* scores;                                 // [kTileRows][kBlockKeys]; of tile_floats
    float *packed_keys, *packed_values;            // [dim][kBlockKeys], [kBlockKeys][padded dim]
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
    rows.scores = take(tile_floats(dim));
    rows.top = take(max_rows);
    rows.sum = take(max_rows);
    rows.total_top = take(max_rows);
    rows.total_sum = take(max_rows);
    return rows;
}

void read_query(const DsAttend& call, int64_t token, int head, int dim, float* to, int padded_dim) {
    const int64_t from = token * call.q_token_stride + head * call.q_head_stride;
    const uint8_t* q = (const uint8_t*)call.q;
    switch (call.q_type) {
        case DS_FLOAT32: return unpack<Float32>(q + 4 * from, dim, to, padded_dim);
        case DS_BFLOAT16: return unpack<BFloat16>(q + 2 * from, dim, to, padded_dim);
        default: return unpack<Float16>(q + 2 * from, dim, to, padded_dim);
    }
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
    uint8_t* out = (uint8_t*)call.out;
    switch (call.q_type) {
        case DS_FLOAT32: return put_row<Float32>(total, factor, work.value_dim, out + 4 * to);
        case DS_BFLOAT16: return put_row<BFloat16>(total, factor, work.value_dim, out + 2 * to);
        default: return put_row<Float16>(total, factor, work.value_dim, out + 2 * to);
    }
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

// Vectors of keys [first, end) of a block that somebody sees.
struct Lanes {
    int first, end;
};

DS_INLINE Lanes lanes_of(int first, int end) { return {first / kLanes, (end + kLanes - 1) / kLanes}; }

// A key and its values stay side by side, as floats.
template <class Element> void unpack_all(Block& block, const Block* next, const DsWork& work, const Rows& rows) {
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
DS_INLINE void score_in_place(const Block& block, const Block* next, int first, int end, const float* q, int dim, float scale,
                     float* scores) {
    constexpr int kKeys = kFewSums / kRows;
    const Vec factor = all(scale);
    for (int j = first / kKeys * kKeys; j < end; j += kKeys) {
        const uint8_t* keys[kKeys];
        for (int k = 0; k < kKeys; k++) {
            const int index = j + k < first ? first : j + k < end ? j + k : end - 1;
            keys[k] = block.keys[index];
            if (next != nullptr) fetch(next->keys[j + k], dim * Element::kBytes);
        }
        Vec sums[kFewSums] = {};
        for (int d = 0; d < dim; d += kLanes) {
            Vec key[kKeys];
            for (int k = 0; k < kKeys; k++) key[k] = Element::load(keys[k] + d * Element::kBytes);
            for (int r = 0; r < kRows; r++) {
                const Vec of_row = load(q + r * dim + d);
                for (int k = 0; k < kKeys; k++) sums[r * kKeys + k] = multiply_add(of_row, key[k], sums[r * kKeys + k]);
            }
        }
        float found[kFewSums];
        for (int i = 0; i < kFewSums; i += kLanes) store(found + i, sums_of(sums + i) * factor);
        for (int r = 0; r < kRows; r++) memcpy(scores + r * kBlockKeys + j, found + r * kKeys, sizeof(float) * kKeys);
    }
}

// Keys lie [channel][key] from then on: a vector is of one channel of as many keys. Channels of a chain follow each other.
template <class Element> void pack_keys(const Block& block, const Block* next, const DsWork& work, const Rows& rows) {
    const Lanes lanes = lanes_of(block.first, block.end);
    const int length = rows.dim / kLanes;  // of a chain
    float* natural = rows.scores;          // [kLanes][padded dim]: memory is read in the order in which it lies
    for (int lane = lanes.first; lane < lanes.end; lane++) {
        for (int i = 0; i < kLanes; i++) {
            const int j = lane * kLanes + i;
            if (next != nullptr) fetch(next->keys[j], work.head_dim * Element::kBytes);
            unpack<Element>(block.keys[j], work.head_dim, natural + i * rows.dim, rows.dim);
        }
        for (int step = 0; step < length; step++) {
            Vec v[kLanes];
            for (int i = 0; i < kLanes; i++) v[i] = load(natural + i * rows.dim + step * kLanes);
            transpose(v);
            for (int i = 0; i < kLanes; i++)
                store(rows.packed_keys + (i * length + step) * kBlockKeys + lane * kLanes, v[i]);
        }
    }
}

// Values stay [key][channel], as floats.
template <class Element> void pack_values(Block& block, const Block* next, const DsWork& work, const Rows& rows) {
    for (int j = block.first; j < block.end; j++) {
        float* value = rows.packed_values + (int64_t)j * rows.value_dim;
        if (next != nullptr) fetch(next->values[j], work.value_dim * Element::kBytes);
        unpack<Element>(block.values[j], work.value_dim, value, rows.value_dim);
        block.values[j] = (const uint8_t*)value;
    }
}

// Scores of kVectors vectors of keys: chains one after the other, whose sums meet as the lanes of sums_of do.
template <int kRows, int kVectors>
DS_INLINE void score_keys(const float* keys, const float* q, int dim, float scale, float* scores) {
    const int length = dim / kLanes;
    Vec met[kLevels][kRows][kVectors];
    for (int n = 0; n < kLanes; n++) {
        const int chain = kSumOrder[n];
        const float* of_chain = keys + chain * length * kBlockKeys;
        Vec sums[kRows][kVectors] = {};
        for (int i = 0; i < length; i++) {
            Vec key[kVectors];
            for (int c = 0; c < kVectors; c++) key[c] = load(of_chain + i * kBlockKeys + c * kLanes);
            for (int r = 0; r < kRows; r++) {
                const Vec of_row = all(q[r * dim + chain * length + i]);
                for (int c = 0; c < kVectors; c++) sums[r][c] = multiply_add(of_row, key[c], sums[r][c]);
            }
        }
        int level = 0;
        for (; n >> level & 1; level++)
            for (int r = 0; r < kRows; r++)
                for (int c = 0; c < kVectors; c++) sums[r][c] = met[level][r][c] + sums[r][c];
        for (int r = 0; r < kRows; r++)
            for (int c = 0; c < kVectors; c++) met[level][r][c] = sums[r][c];
    }
    for (int r = 0; r < kRows; r++)
        for (int c = 0; c < kVectors; c++)
            store(scores + r * kBlockKeys + c * kLanes, met[kLevels - 1][r][c] * all(scale));
}

template <int kRows>
void score(const float* keys, Lanes lanes, const float* q, int dim, float scale, float* scores) {
    int lane = lanes.first;
    const auto of = [&](auto vectors) {
        constexpr int kVectors = decltype(vectors)::value;
        for (; lane + kVectors <= lanes.end; lane += kVectors)
            score_keys<kRows, kVectors>(keys + lane * kLanes, q, dim, scale, scores + lane * kLanes);
    };
    of(Count<kTileVectors>{});
    if (kTileVectors > 2) of(Count<2>{});
    of(Count<1>{});
}

DS_INLINE Vec visible(Vec scores, int lane, int first, int end) {
    IntVec index;
    for (int i = 0; i < kLanes; i++) index[i] = i;
    index += lane * kLanes;
    return (index >= first) & (index < end) ? scores : all(kHidden);
}

// What each row of a tile sees of a block.
template <int kRows> struct Seen {
    int firsts[kRows], ends[kRows];
    int first = kBlockKeys, end = 0;  // of all; first >= end: nothing
};

// Scores to weights; `factors` are those of what each row had before.
template <int kRows>
DS_INLINE void weigh(float* scores, const Seen<kRows>& seen, float* top, float* sum, float* factors) {
    const Lanes lanes = lanes_of(seen.first, seen.end);
    float changes[(kRows + kLanes - 1) / kLanes * kLanes] = {};
    for (int r = 0; r < kRows; r++) {
        float* of_row = scores + r * kBlockKeys;
        Vec highest = all(kHidden);
        if (seen.firsts[r] > lanes.first * kLanes || seen.ends[r] < lanes.end * kLanes)
            for (int lane = lanes.first; lane < lanes.end; lane++)
                store(of_row + lane * kLanes, visible(load(of_row + lane * kLanes), lane, seen.firsts[r], seen.ends[r]));
        for (int lane = lanes.first; lane < lanes.end; lane++) highest = larger(load(of_row + lane * kLanes), highest);
        const float found = largest_of(highest), new_top = found > top[r] ? found : top[r];
        changes[r] = top[r] - new_top;
        top[r] = new_top;
    }
    Vec totals[kRows] = {};
    for (int lane = lanes.first; lane < lanes.end; lane++)
        for (int r = 0; r < kRows; r++) {
            float* at = scores + r * kBlockKeys + lane * kLanes;
            const Vec weights = exp2_of(load(at) - all(top[r]));
            store(at, weights);
            totals[r] = totals[r] + weights;
        }
    for (int r = 0; r < kRows; r += kLanes) store(changes + r, exp2_of(load(changes + r)));
    for (int r = 0; r < kRows; r++) {
        factors[r] = changes[r];
        sum[r] = sum[r] * factors[r] + sum_of(totals[r]);
    }
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

// Weighted values are added from the first key to the last.
template <class Element, int kRows>
void add_values(const Block& block, const Block* next, int first, int end, const float* weights, const float* factors,
                float* values, int value_dim) {
    constexpr int kMost = kRows * 8 <= kSums ? 8 : kRows * 4 <= kSums ? 4 : 2;
    int d = 0;
    const auto of = [&](auto vectors) {
        constexpr int kVectors = decltype(vectors)::value;
        for (; d + kVectors * kLanes <= value_dim; d += kVectors * kLanes)
            add_channels<Element, kRows, kVectors>(block, next, first, end, weights, factors, values, value_dim, d);
    };
    of(Count<kMost>{});
    if (kMost > 4) of(Count<4>{});
    if (kMost > 2) of(Count<2>{});
    of(Count<1>{});
}

// Rows [row, row + kRows) of the task meet a block.
template <class Element, int kRows, bool kIsFew>
void meet(const Block& block, const Block* next, const PlanView& plan, const Task& task, float scale, const Rows& rows, int row) {
    const Segment& segment = plan.segments[task.segment];
    Seen<kRows> seen;
    for (int r = 0; r < kRows; r++) {
        const TokenRows& token = plan.rows[segment.rows + (task.first + row + r) / plan.work->group_size];
        const int first = (int)least(most(token.first_key - block.start, block.first), kBlockKeys);
        const int end = (int)most(least(token.end_key - block.start, block.end), first);
        seen.firsts[r] = first;
        seen.ends[r] = end;
        if (first == end) continue;
        seen.first = first < seen.first ? first : seen.first;
        seen.end = end > seen.end ? end : seen.end;
    }
    if (seen.first >= seen.end) return;
    const float* q = rows.q + (int64_t)row * rows.dim;
    if (kIsFew)
        score_in_place<Element, kRows>(block, next, seen.first, seen.end, q, rows.dim, scale, rows.scores);
    else
        score<kRows>(rows.packed_keys, lanes_of(seen.first, seen.end), q, rows.dim, scale, rows.scores);
    float factors[kRows];
    weigh<kRows>(rows.scores, seen, rows.top + row, rows.sum + row, factors);
    add_values<Element, kRows>(block, next, seen.first, seen.end, rows.scores, factors,
                               rows.values + (int64_t)row * rows.value_dim, rows.value_dim);
}

// Few rows: each key meets them as it is read.
template <class Element>
void meet_few(const Block& block, const Block* next, const PlanView& plan, const Task& task, float scale, const Rows& rows) {
    int row = 0;
    for (; row + 4 <= task.num_rows; row += 4, next = nullptr)
        meet<Element, 4, true>(block, next, plan, task, scale, rows, row);
    for (; row + 2 <= task.num_rows; row += 2, next = nullptr)
        meet<Element, 2, true>(block, next, plan, task, scale, rows, row);
    for (; row < task.num_rows; row++, next = nullptr) meet<Element, 1, true>(block, next, plan, task, scale, rows, row);
}

// Many rows: in as few tiles as hold them, of about the same size.
void meet_many(const Block& block, const PlanView& plan, const Task& task, float scale, const Rows& rows) {
    static_assert(kTileRows == 6 && kFewRows >= 4, "one case for each size of a tile");
    int row = 0;
    for (int tiles = (task.num_rows + kTileRows - 1) / kTileRows; tiles > 0; tiles--) {
        const int size = (task.num_rows - row + tiles - 1) / tiles;
        switch (size) {
            case 3: meet<Float32, 3, false>(block, nullptr, plan, task, scale, rows, row); break;
            case 4: meet<Float32, 4, false>(block, nullptr, plan, task, scale, rows, row); break;
            case 5: meet<Float32, 5, false>(block, nullptr, plan, task, scale, rows, row); break;
            default: meet<Float32, 6, false>(block, nullptr, plan, task, scale, rows, row);
        }
        row += size;
    }
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
        float* q = rows.q + (int64_t)row * rows.dim;
        if (task.num_rows <= kFewRows) {
            read_query(call, token.token, head, plan.work->head_dim, q, rows.dim);
        } else {
            read_query(call, token.token, head, plan.work->head_dim, rows.scores, rows.dim);
            for (int d = 0; d < rows.dim; d++) q[d % kLanes * (rows.dim / kLanes) + d / kLanes] = rows.scores[d];
        }
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
    const bool is_few = task.num_rows <= kFewRows;
    const bool fits_vectors = work.head_dim == rows.dim && work.value_dim == rows.value_dim;
    // Several tiles of rows would convert a key again and again.
    const bool unpacks = !fits_vectors || (Element::kBytes < 4 && task.num_rows > 4);
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
            if (!is_few) {
                pack_keys<Element>(*block, ahead, work, rows);
                if (work.value_dim != rows.value_dim || Element::kBytes < 4) pack_values<Element>(*block, ahead, work, rows);
                meet_many(*block, plan, task, scale, rows);
            } else if (unpacks) {
                unpack_all<Element>(*block, ahead, work, rows);
                meet_few<Float32>(*block, nullptr, plan, task, scale, rows);
            } else {
                meet_few<Element>(*block, ahead, plan, task, scale, rows);
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
