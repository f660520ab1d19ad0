// Attention over pages: scores, softmax and values of one block of keys after the other, in place.
//
// Sums are float32. A score of a short query's row is the sum of as many chains as a vector has lanes: chain l adds the
// products of channels l, l + kLanes and so on (of pairs of channels, where a lane holds two), and the chains' sums meet in a
// fixed order. Few rows read keys as they lie, their lanes are chains; for many, keys of a block are laid out anew, their
// lanes are keys. Of a long query's row, where its task has many, a score is one chain. Weighted values are added from the
// first key to the last, or from the first pair. So neither the number of rows nor the way they go changes a bit of a short
// query's.
#include "attention_kernel.h"
#include "vectors.h"
#if defined(DELTASERVE_TILES)
#include "tiles.h"
#endif

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

// How a key meets a row and a value a weight. Slots are what a lane holds of a key: a channel, or two of them.
template <class Element> struct Products {
    using Key = Element;
    using Value = Element;
    using Packed = Products<Float32>;  // where keys and values were made floats
    static constexpr bool kPairs = false, kPairsInPlace = false, kOneChain = false;
    static constexpr int slots(int dim) { return dim; }
    static DS_INLINE Vec add(Vec of_row, Vec key, Vec sum) { return multiply_add(of_row, key, sum); }
};

#if defined(__AVX512BF16__)
// Queries and KV in bfloat16: products of two channels, or of two keys, are added to a sum at once. Weights are rounded to
// bfloat16, those that are added up as well.
template <bool kInPlace> struct PairProducts {  // values as they lie, or from pack_value_pairs
    using Key = Float32;  // two channels: moved, never computed with
    using Value = BFloat16;
    using Packed = PairProducts<false>;
    static constexpr bool kPairs = true, kPairsInPlace = kInPlace, kOneChain = false;
    static constexpr int slots(int dim) { return dim / 2; }
    static DS_INLINE Vec add(Vec of_row, Vec key, Vec sum) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)of_row, (__m512bh)key);
    }
};
#endif

// Many rows of a long query: a score is one chain, from the first slot to the last.
template <class P> struct OneChain : P {
    using Packed = OneChain<typename P::Packed>;
    static constexpr bool kOneChain = true;
};

DS_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Rows of one task, and what is known of them so far.
struct Rows {
    float *q, *values, *total;                     // [row][padded dim]: of the split, of all splits before
    float *top, *sum, *total_top, *total_sum;      // [row]
    float* scores;                                 // [row of a group of tiles][kBlockKeys]; of score_floats
    float *packed_keys, *packed_values;            // [dim][kBlockKeys], [kBlockKeys][padded dim]
    int64_t *first_keys, *end_keys;                // [row]: that it sees
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
    rows.scores = take(score_floats(dim));
    rows.top = take(max_rows);
    rows.sum = take(max_rows);
    rows.total_top = take(max_rows);
    rows.total_sum = take(max_rows);
    rows.first_keys = (int64_t*)take(2 * (int64_t)max_rows);
    rows.end_keys = (int64_t*)take(2 * (int64_t)max_rows);
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

// Rows that meet a block together, from `row` on, where a tile begins: as few tiles as hold all, of about the same size.
DS_INLINE int size_of_tile(int num_rows, int row) {
    const int tiles = (num_rows + kTileRows - 1) / kTileRows, least_rows = num_rows / tiles;
    return row < num_rows % tiles * (least_rows + 1) ? least_rows + 1 : least_rows;
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

template <class P> DS_INLINE Lanes lanes_of(int first, int end) {
    constexpr int kStep = P::kPairs ? 2 : 1;  // weights become pairs two vectors at a time
    return {first / (kStep * kLanes) * kStep, (end + kStep * kLanes - 1) / (kStep * kLanes) * kStep};
}

// Keys stay [key][slot], as floats.
template <class P> void unpack_keys(Block& block, const Block* next, const DsWork& work, const Rows& rows) {
    using Key = typename P::Key;
    const int slots = P::slots(work.head_dim);
    for (int j = block.first; j < block.end; j++) {
        float* key = rows.packed_keys + (int64_t)j * rows.dim;
        if (next != nullptr) fetch(next->keys[j], slots * Key::kBytes);
        unpack<Key>(block.keys[j], slots, key, rows.dim);
        block.keys[j] = (const uint8_t*)key;
    }
}

// Keys [first, end) of the block that any of the kRows rows sees.
template <class P, int kRows>
DS_INLINE void score_in_place(const Block& block, const Block* next, int first, int end, const float* q, int dim,
                              float scale, float* scores) {
    using Key = typename P::Key;
    constexpr int kKeys = kFewSums / (kRows == 3 ? 4 : kRows);  // a block is a multiple of it
    const Vec factor = all(scale);
    for (int j = first / kKeys * kKeys; j < end; j += kKeys) {
        const uint8_t* keys[kKeys];
        for (int k = 0; k < kKeys; k++) {
            const int index = j + k < first ? first : j + k < end ? j + k : end - 1;
            keys[k] = block.keys[index];
            if (next != nullptr) fetch(next->keys[j + k], dim * Key::kBytes);
        }
        Vec sums[kFewSums] = {};
        for (int d = 0; d < dim; d += kLanes) {
            Vec key[kKeys];
            for (int k = 0; k < kKeys; k++) key[k] = Key::load(keys[k] + d * Key::kBytes);
            for (int r = 0; r < kRows; r++) {
                const Vec of_row = load(q + r * dim + d);
                for (int k = 0; k < kKeys; k++) sums[r * kKeys + k] = P::add(of_row, key[k], sums[r * kKeys + k]);
            }
        }
        float found[kFewSums];
        for (int i = 0; i < kFewSums; i += kLanes) store(found + i, sums_of(sums + i) * factor);
        for (int r = 0; r < kRows; r++) memcpy(scores + r * kBlockKeys + j, found + r * kKeys, sizeof(float) * kKeys);
    }
}

// Slots of a chain follow each other.
template <class P> DS_INLINE int place_of(int slot, int dim) {
    return P::kOneChain ? slot : slot % kLanes * (dim / kLanes) + slot / kLanes;
}

// Keys lie [slot][key] from then on: a vector is of one slot of as many keys.
template <class P> void pack_keys(const Block& block, const Block* next, const DsWork& work, const Rows& rows) {
    using Key = typename P::Key;
    const Lanes lanes = lanes_of<P>(block.first, block.end);
    const int slots = P::slots(work.head_dim);
    const int length = rows.dim / kLanes;  // of a chain
    float* natural = rows.scores;          // [kLanes][padded dim]: memory is read in the order in which it lies
    for (int lane = lanes.first; lane < lanes.end; lane++) {
        for (int i = 0; i < kLanes; i++) {
            const int j = lane * kLanes + i;
            if (next != nullptr) fetch(next->keys[j], slots * Key::kBytes);
            unpack<Key>(block.keys[j], slots, natural + i * rows.dim, rows.dim);
        }
        for (int step = 0; step < length; step++) {
            Vec v[kLanes];
            for (int i = 0; i < kLanes; i++) v[i] = load(natural + i * rows.dim + step * kLanes);
            transpose(v);
            for (int i = 0; i < kLanes; i++) {
                const int place = place_of<P>(step * kLanes + i, rows.dim);
                store(rows.packed_keys + (int64_t)place * kBlockKeys + lane * kLanes, v[i]);
            }
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

#if defined(__AVX512BF16__)
// Of 32 channels of two keys: the pairs of the first 16 channels, and of the others.
alignas(64) const uint16_t kPairOrder[2][32] = {
    {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41,
     10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
    {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57,
     26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};

template <int kHalf> DS_INLINE Vec pairs_of(__m512i first, __m512i second) {
    return (Vec)_mm512_permutex2var_epi16(first, _mm512_load_si512(kPairOrder[kHalf]), second);
}

// Values lie [pair of keys][channel] from then on. A pair lies at absolute positions in the block; weights of keys that
// nobody sees are 0.
void pack_value_pairs(const Block& block, const Block* next, const DsWork& work, const Rows& rows) {
    for (int j = block.first / 2 * 2; j < block.end; j += 2) {
        float* to = rows.packed_values + (int64_t)(j / 2) * rows.value_dim;
        if (next != nullptr) {
            fetch(next->values[j], work.value_dim * 2);
            fetch(next->values[j + 1], work.value_dim * 2);
        }
        for (int d = 0; d < work.value_dim; d += 32) {
            const int64_t seen = least(work.value_dim - d, 32);
            const __mmask32 mask = seen == 32 ? 0xffffffffu : (1u << seen) - 1;
            const __m512i first = _mm512_maskz_loadu_epi16(mask, block.values[j] + 2 * d);
            const __m512i second = _mm512_maskz_loadu_epi16(mask, block.values[j + 1] + 2 * d);
            store(to + d, pairs_of<0>(first, second));
            if (seen > 16) store(to + d + 16, pairs_of<1>(first, second));
        }
    }
}
#endif

// Scores of kRows rows of a tile of kTile and of kVectors vectors of keys: kChains chains at a time, whose sums meet as the
// lanes of sums_of do. Sums of chains that go at a time meet in registers, others through memory.
template <class P, int kTile, int kRows, int kVectors, int kChains>
DS_INLINE void score_keys(const float* keys, const float* q, int length, float scale, float* scores) {
    static_assert(kChains == 1 || kChains == 2, "chains meet two by two");
    Vec met[kLevels][kRows][kVectors];
    for (int n = 0; n < kLanes; n += kChains) {
        const float *of_chain[kChains], *of_rows[kChains];
        for (int h = 0; h < kChains; h++) {
            of_chain[h] = keys + kSumOrder[n + h] * length * kBlockKeys;
            of_rows[h] = q + kSumOrder[n + h] * length * kTile;
        }
        Vec sums[kChains][kRows][kVectors] = {};
        for (int i = 0; i < length; i++)
            for (int h = 0; h < kChains; h++) {
                Vec key[kVectors];
                for (int c = 0; c < kVectors; c++) key[c] = held(load(of_chain[h] + c * kLanes));
                for (int r = 0; r < kRows; r++) {
                    const Vec of_row = all(of_rows[h][r]);
                    for (int c = 0; c < kVectors; c++) sums[h][r][c] = P::add(of_row, key[c], sums[h][r][c]);
                }
                of_chain[h] += kBlockKeys;
                of_rows[h] += kTile;
            }
        int level = kChains - 1;
        if (kChains == 2)
            for (int r = 0; r < kRows; r++)
                for (int c = 0; c < kVectors; c++) sums[0][r][c] = sums[0][r][c] + sums[kChains - 1][r][c];
        for (; n >> level & 1; level++)
            for (int r = 0; r < kRows; r++)
                for (int c = 0; c < kVectors; c++) sums[0][r][c] = met[level][r][c] + sums[0][r][c];
        for (int r = 0; r < kRows; r++)
            for (int c = 0; c < kVectors; c++) met[level][r][c] = sums[0][r][c];
    }
    for (int r = 0; r < kRows; r++)
        for (int c = 0; c < kVectors; c++)
            store(scores + r * kBlockKeys + c * kLanes, met[kLevels - 1][r][c] * all(scale));
}

// The same as one chain.
template <class P, int kRows, int kVectors>
DS_INLINE void score_in_one_chain(const float* keys, const float* q, int dim, float scale, float* scores) {
    Vec sums[kRows][kVectors] = {};
    for (int d = 0; d < dim; d++) {
        Vec key[kVectors];
        for (int c = 0; c < kVectors; c++) key[c] = held(load(keys + d * kBlockKeys + c * kLanes));
        for (int r = 0; r < kRows; r++) {
            const Vec of_row = all(q[d * kRows + r]);
            for (int c = 0; c < kVectors; c++) sums[r][c] = P::add(of_row, key[c], sums[r][c]);
        }
    }
    for (int r = 0; r < kRows; r++)
        for (int c = 0; c < kVectors; c++) store(scores + r * kBlockKeys + c * kLanes, sums[r][c] * all(scale));
}

template <class P, int kTile, int kRows, int kChains>
DS_INLINE void score_rows(const float* keys, Lanes lanes, const float* q, int dim, float scale, float* scores) {
    int lane = lanes.first;
    const auto of = [&](auto vectors) {
        constexpr int kVectors = decltype(vectors)::value;
        for (; lane + kVectors <= lanes.end; lane += kVectors)
            if constexpr (P::kOneChain)
                score_in_one_chain<P, kRows, kVectors>(keys + lane * kLanes, q, dim, scale, scores + lane * kLanes);
            else
                score_keys<P, kTile, kRows, kVectors, kChains>(keys + lane * kLanes, q, dim / kLanes, scale,
                                                               scores + lane * kLanes);
    };
    of(Count<kTileVectors>{});
    if (kTileVectors > 2) of(Count<2>{});
    of(Count<1>{});
}

// With many chains, half of the rows at a time: their sums of two chains take the registers of all.
template <class P, int kRows>
void score(const float* keys, Lanes lanes, const float* q, int dim, float scale, float* scores) {
    if (kLanes < 16 || P::kOneChain) return score_rows<P, kRows, kRows, 1>(keys, lanes, q, dim, scale, scores);
    constexpr int kHalf = (kRows + 1) / 2, kOthers = kRows - kHalf;
    score_rows<P, kRows, kHalf, 2>(keys, lanes, q, dim, scale, scores);
    score_rows<P, kRows, kOthers, 2>(keys, lanes, q + kHalf, dim, scale, scores + kHalf * kBlockKeys);
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

// Of rows [row, row + count) of the task; count <= kRows.
template <int kRows> Seen<kRows> seen_by(const Block& block, const Rows& rows, int row, int count) {
    Seen<kRows> seen;
    for (int r = 0; r < count; r++) {
        const int first = (int)least(most(rows.first_keys[row + r] - block.start, block.first), kBlockKeys);
        const int end = (int)most(least(rows.end_keys[row + r] - block.start, block.end), first);
        seen.firsts[r] = first;
        seen.ends[r] = end;
        seen.first = first < end && first < seen.first ? first : seen.first;
        seen.end = first < end && end > seen.end ? end : seen.end;
    }
    return seen;
}

// In pairs, weights of a row lie [pair of keys] at the start of its scores.
template <class P, int kRows> DS_INLINE void pair_weights(float* scores, Lanes lanes, Vec* totals) {
#if defined(__AVX512BF16__)
    if (!P::kPairs) return;
    const Vec ones = (Vec)_mm512_set1_epi32(0x3f803f80);
    for (int lane = lanes.first; lane < lanes.end; lane += 2)
        for (int r = 0; r < kRows; r++) {
            const float* from = scores + r * kBlockKeys + lane * kLanes;
            const Vec pairs = (Vec)_mm512_cvtne2ps_pbh((__m512)load(from + kLanes), (__m512)load(from));
            store(scores + r * kBlockKeys + lane / 2 * kLanes, pairs);
            totals[r] = P::add(pairs, ones, totals[r]);
        }
#else
    (void)scores, (void)lanes, (void)totals;
#endif
}

// Scores to weights; `factors` are those of what each row had before.
template <class P, int kRows>
DS_INLINE void weigh(float* scores, const Seen<kRows>& seen, float* top, float* sum, float* factors) {
    const Lanes lanes = lanes_of<P>(seen.first, seen.end);
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
            if (!P::kPairs) totals[r] = totals[r] + weights;
        }
    pair_weights<P, kRows>(scores, lanes, totals);
    for (int r = 0; r < kRows; r += kLanes) store(changes + r, exp2_of(load(changes + r)));
    for (int r = 0; r < kRows; r++) {
        factors[r] = changes[r];
        sum[r] = sum[r] * factors[r] + sum_of(totals[r]);
    }
}

// Values of a pair of keys, from channel d on.
template <int kVectors> DS_INLINE void pair_values(const Block& block, int pair, int d, Vec* values) {
#if defined(__AVX512BF16__)
    for (int c = 0; c + 1 < kVectors; c += 2) {
        const __m512i first = _mm512_loadu_si512(block.values[2 * pair] + 2 * (d + c * kLanes));
        const __m512i second = _mm512_loadu_si512(block.values[2 * pair + 1] + 2 * (d + c * kLanes));
        values[c] = pairs_of<0>(first, second);
        values[c + 1] = pairs_of<1>(first, second);
    }
#else
    (void)block, (void)pair, (void)d, (void)values;
#endif
}

template <class P, int kRows, int kVectors>
DS_INLINE void add_channels(const Block& block, const Block* next, int first, int end, const float* pairs,
                            const float* weights, const float* factors, float* values, int value_dim, int d) {
    Vec sums[kRows][kVectors];
    for (int r = 0; r < kRows; r++)
        for (int c = 0; c < kVectors; c++)
            sums[r][c] = load(values + r * value_dim + d + c * kLanes) * all(factors[r]);
    using Value = typename P::Value;
    constexpr int kStep = P::kPairs ? 2 : 1;
    for (int j = first / kStep; j < (end + kStep - 1) / kStep; j++) {
        Vec value[kVectors];
        if (next != nullptr && d == 0 && P::kPairs == P::kPairsInPlace)
            for (int i = 0; i < kStep; i++) fetch(next->values[j * kStep + i], value_dim * Value::kBytes);
        if (P::kPairsInPlace) {
            pair_values<kVectors>(block, j, d, value);
        } else if (P::kPairs) {
            for (int c = 0; c < kVectors; c++) value[c] = held(load(pairs + j * value_dim + d + c * kLanes));
        } else {
            for (int c = 0; c < kVectors; c++)
                value[c] = held(Value::load(block.values[j] + (d + c * kLanes) * Value::kBytes));
        }
        for (int r = 0; r < kRows; r++) {
            const Vec weight = all(weights[r * kBlockKeys + j]);
            for (int c = 0; c < kVectors; c++) sums[r][c] = P::add(weight, value[c], sums[r][c]);
        }
    }
    for (int r = 0; r < kRows; r++)
        for (int c = 0; c < kVectors; c++) store(values + r * value_dim + d + c * kLanes, sums[r][c]);
}

// Weighted values are added from the first key to the last.
template <class P, int kRows>
void add_values(const Block& block, const Block* next, int first, int end, const float* pairs, const float* weights,
                const float* factors, float* values, int value_dim) {
    constexpr int kMost = kRows * 8 <= kSums ? 8 : kRows * 4 <= kSums ? 4 : 2;
    int d = 0;
    const auto of = [&](auto vectors) {
        constexpr int kVectors = decltype(vectors)::value;
        for (; d + kVectors * kLanes <= value_dim; d += kVectors * kLanes)
            add_channels<P, kRows, kVectors>(block, next, first, end, pairs, weights, factors, values, value_dim, d);
    };
    of(Count<kMost>{});
    if (kMost > 4) of(Count<4>{});
    if (kMost > 2) of(Count<2>{});
    of(Count<1>{});
}

// What is known of a tile's rows when they have met a block's keys.
struct Met {
    int first, end;  // keys that some row sees; first >= end: none
    float factors[kTileRows];
};

// Rows [row, row + kRows) of the task meet the keys of a block.
template <class P, int kRows, bool kIsFew>
void meet_keys(const Block& block, const Block* next, float scale, const Rows& rows, int row, float* scores, Met& met) {
    const Seen<kRows> seen = seen_by<kRows>(block, rows, row, kRows);
    met.first = seen.first;
    met.end = seen.end;
    if (seen.first >= seen.end) return;
    const float* q = rows.q + (int64_t)row * rows.dim;
    if (kIsFew)
        score_in_place<P, kRows>(block, next, seen.first, seen.end, q, rows.dim, scale, scores);
    else
        score<P, kRows>(rows.packed_keys, lanes_of<P>(seen.first, seen.end), q, rows.dim, scale, scores);
    weigh<P, kRows>(scores, seen, rows.top + row, rows.sum + row, met.factors);
}

// ... and its values.
template <class P, int kRows>
void meet_values(const Block& block, const Block* next, const Rows& rows, int row, const float* scores, const Met& met) {
    if (met.first >= met.end) return;
    add_values<P, kRows>(block, next, met.first, met.end, rows.packed_values, scores, met.factors,
                         rows.values + (int64_t)row * rows.value_dim, rows.value_dim);
}

template <class P, int kRows>
void meet(const Block& block, const Block* next, float scale, const Rows& rows, int row) {
    Met met;
    meet_keys<P, kRows, true>(block, next, scale, rows, row, rows.scores, met);
    meet_values<P, kRows>(block, next, rows, row, rows.scores, met);
}

// Few rows: each key meets them as it is read.
template <class P>
void meet_few(const Block& block, const Block* next, int num_rows, float scale, const Rows& rows) {
    int row = 0;
    for (; row + 4 <= num_rows; row += 4, next = nullptr) meet<P, 4>(block, next, scale, rows, row);
    for (; row + 3 <= num_rows; row += 3, next = nullptr) meet<P, 3>(block, next, scale, rows, row);
    for (; row + 2 <= num_rows; row += 2, next = nullptr) meet<P, 2>(block, next, scale, rows, row);
    for (; row < num_rows; row++, next = nullptr) meet<P, 1>(block, next, scale, rows, row);
}

template <class Act> DS_INLINE void of_size(int size, Act act) {
    static_assert(kTileRows == 6 && kFewRows >= 4, "one case for each size of a tile");
    switch (size) {
        case 3: return act(Count<3>{});
        case 4: return act(Count<4>{});
        case 5: return act(Count<5>{});
        default: return act(Count<6>{});
    }
}

// Many rows go in tiles, and these in groups: a block's keys stay in the first cache while a group meets them, then its
// values.
template <class P>
void meet_many(const Block& block, int num_rows, float scale, const Rows& rows) {
    Met met[kGroupTiles];
    for (int begin = 0; begin < num_rows;) {
        int row = begin, tiles = 0;
        for (; tiles < kGroupTiles && row < num_rows; tiles++) {
            const int size = size_of_tile(num_rows, row);
            of_size(size, [&](auto count) {
                meet_keys<P, decltype(count)::value, false>(block, nullptr, scale, rows, row,
                                                            rows.scores + tiles * kTileRows * kBlockKeys, met[tiles]);
            });
            row += size;
        }
        row = begin;
        for (int tile = 0; tile < tiles; tile++) {
            const int size = size_of_tile(num_rows, row);
            of_size(size, [&](auto count) {
                meet_values<P, decltype(count)::value>(block, nullptr, rows, row,
                                                       rows.scores + tile * kTileRows * kBlockKeys, met[tile]);
            });
            row += size;
        }
        begin = row;
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

template <class P>
void read_row(const DsAttend& call, int64_t token, int head, int dim, float* to, int padded_dim) {
    if (!P::kPairs) return read_query(call, token, head, dim, to, padded_dim);
    const int64_t from = token * call.q_token_stride + head * call.q_head_stride;
    unpack<Float32>((const uint8_t*)call.q + 2 * from, P::slots(dim), to, padded_dim);
}

// place(row, token, head) for each row of the task, which has met nothing yet.
template <class Place> void begin_rows(const PlanView& plan, const Task& task, const Rows& rows, Place place) {
    const Segment& segment = plan.segments[task.segment];
    const int group = plan.work->group_size;
    for (int row = 0; row < task.num_rows; row++) {
        const TokenRows& token = plan.rows[segment.rows + (task.first + row) / group];
        place(row, token.token, task.head * group + (task.first + row) % group);
        rows.first_keys[row] = token.first_key;
        rows.end_keys[row] = token.end_key;
        clear(rows.values + (int64_t)row * rows.value_dim, rows.top + row, rows.sum + row, rows.value_dim);
        clear(rows.total + (int64_t)row * rows.value_dim, rows.total_top + row, rows.total_sum + row, rows.value_dim);
    }
}

template <class P> void read_rows(const PlanView& plan, const DsAttend& call, const Task& task, const Rows& rows) {
    const int dim = plan.work->head_dim;
    int tile = 0, size = task.num_rows <= kFewRows ? 1 : size_of_tile(task.num_rows, 0);
    begin_rows(plan, task, rows, [&](int row, int64_t token, int head) {
        if (task.num_rows <= kFewRows)
            return read_row<P>(call, token, head, dim, rows.q + (int64_t)row * rows.dim, rows.dim);
        if (row == tile + size) {  // slots as pack_keys has them, of each those of a tile's rows
            tile = row;
            size = size_of_tile(task.num_rows, row);
        }
        float* of_tile = rows.q + (int64_t)tile * rows.dim + row - tile;
        read_row<P>(call, token, head, dim, rows.scores, rows.dim);
        for (int d = 0; d < rows.dim; d++) of_tile[place_of<P>(d, rows.dim) * size] = rows.scores[d];
    });
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

template <class P>
void meet_all(Block& block, const Block* next, const PlanView& plan, const Task& task, float scale, const Rows& rows) {
    using Packed = typename P::Packed;
    const DsWork& work = *plan.work;
    const bool is_few = !P::kOneChain && task.num_rows <= kFewRows, fits_keys = P::slots(work.head_dim) == rows.dim;
    // Several tiles of rows would convert a key again and again.
    const bool unpacks = !fits_keys || (P::Key::kBytes < 4 && task.num_rows > 4);
    const bool unpacks_values = work.value_dim != rows.value_dim || (P::Value::kBytes < 4 && task.num_rows > 4);
    if (!is_few)
        pack_keys<P>(block, next, work, rows);
    else if (P::kPairs ? unpacks : unpacks || unpacks_values)
        unpack_keys<P>(block, next, work, rows);
#if defined(__AVX512BF16__)
    if (P::kPairs && !P::kPairsInPlace)
        pack_value_pairs(block, next, work, rows);
    else if (!P::kPairs)
#endif
    if (unpacks_values || (is_few && unpacks))
        pack_values<typename P::Value>(block, next, work, rows);
    if (!is_few)
        return meet_many<Packed>(block, task.num_rows, scale, rows);
    if constexpr (P::kOneChain) return;
    if (P::kPairs ? unpacks : unpacks || unpacks_values)
        meet_few<Packed>(block, nullptr, task.num_rows, scale, rows);
    else
        meet_few<P>(block, next, task.num_rows, scale, rows);
}

#if defined(DELTASERVE_TILES)
// Queries and KV in bfloat16 in tile registers. Scores are [key][row] there: so keys are read as they lie, 16 at a time, and
// the rows, which are packed once, are what is multiplied with. Weights and values meet as pairs of keys. A row's sums
// follow from places of keys in a block alone, whatever the other rows of its tile are.
struct TileProducts : PairProducts<false> {
    static bool fits(const DsAttend& call, const DsWork& work) {
        return call.kv_type == DS_BFLOAT16 && call.q_type == DS_BFLOAT16 && work.head_dim % kTilePair == 0 &&
               work.value_dim % kTile == 0;
    }
};

constexpr int kMostTileRows = 2 * kTile;  // that meet a block's keys and then its values
static_assert(score_floats(kTile) >= kMostTileRows * kBlockKeys, "scores of two tiles of rows");

template <>
void read_rows<TileProducts>(const PlanView& plan, const DsAttend& call, const Task& task, const Rows& rows) {
    const int64_t num_tiles = (task.num_rows + kTile - 1) / kTile;
    memset(rows.q, 0, sizeof(float) * num_tiles * kTile * rows.dim);
    begin_rows(plan, task, rows, [&](int row, int64_t token, int head) {  // [tile][slot][row]
        read_row<TileProducts>(call, token, head, plan.work->head_dim, rows.scores, rows.dim);
        float* to = rows.q + (int64_t)(row - row % kTile) * rows.dim + row % kTile;
        for (int d = 0; d < rows.dim; d++) to[d * kTile] = rows.scores[d];
    });
}

// Keys of a block, 16 at a time: where they lie, or copies side by side where pages are not evenly spaced.
void locate_tiles(const Block& block, const Block* next, const DsWork& work, const Rows& rows, TileAt* tiles) {
    const Lanes lanes = lanes_of<TileProducts>(block.first, block.end);
    const int key_bytes = 2 * work.head_dim;
    for (int tile = lanes.first; tile < lanes.end; tile++) {
        const uint8_t* const* keys = block.keys + tile * kTile;
        const int64_t stride = keys[1] - keys[0];
        bool is_even = true;
        for (int i = 2; i < kTile; i++) is_even &= keys[i] == keys[0] + i * stride;
        uint8_t* copies = (uint8_t*)(rows.packed_keys + (int64_t)tile * kTile * rows.dim);
        tiles[tile] = is_even ? TileAt{keys[0], stride} : TileAt{copies, key_bytes};
        for (int i = 0; i < kTile; i++) {
            if (!is_even) memcpy(copies + i * key_bytes, keys[i], key_bytes);
            if (next != nullptr) fetch(next->keys[tile * kTile + i], key_bytes);
        }
    }
}

// Pairs of keys that nobody sees meet weights of 0, so they must be numbers.
void clear_other_pairs(const Block& block, const Rows& rows) {
    const Lanes lanes = lanes_of<TileProducts>(block.first, block.end);
    const auto clear_pairs = [&](int first, int end) {
        memset(rows.packed_values + (int64_t)first * rows.value_dim, 0, sizeof(float) * (end - first) * rows.value_dim);
    };
    clear_pairs(lanes.first * kTile / 2, block.first / 2);
    clear_pairs((block.end + 1) / 2, lanes.end * kTile / 2);
}

// Of kKeys tiles of keys and kRows tiles of rows.
template <int kKeys, int kRows>
void score_tiles(const TileAt* keys, const float* q, int dim, float scale, float* scores) {
    using Sums = TileSums<kKeys, kRows>;
    Sums::clear();
    for (int d = 0; d < dim; d += kTile) {
        TileAt of_keys[kKeys], of_rows[kRows];
        for (int i = 0; i < kKeys; i++) of_keys[i] = {(const uint8_t*)keys[i].first + 4 * d, keys[i].stride};
        for (int i = 0; i < kRows; i++) of_rows[i] = {q + (int64_t)i * kTile * dim + d * kTile, kTileBytes};
        Sums::add(of_keys, of_rows);
    }
    alignas(64) float found[kKeys * kTile][kRows * kTile];
    Sums::store(found[0], kRows * kTile);
    for (int key = 0; key < kKeys * kTile; key += kTile)
        for (int row = 0; row < kRows * kTile; row += kTile) {
            Vec v[kTile];
            for (int i = 0; i < kTile; i++) v[i] = load(found[key + i] + row);
            transpose(v);
            for (int i = 0; i < kTile; i++) store(scores + (row + i) * kBlockKeys + key, v[i] * all(scale));
        }
}

// Channels from d on, of kRows tiles of rows and kChannels tiles of channels.
template <int kRows, int kChannels> void add_tiles(const Lanes& lanes, const Rows& rows, float* values, int d) {
    using Sums = TileSums<kRows, kChannels>;
    Sums::load(values + d, rows.value_dim);
    for (int pair = lanes.first * kTile / 2; pair < lanes.end * kTile / 2; pair += kTile) {
        TileAt weights[kRows], of_values[kChannels];
        for (int i = 0; i < kRows; i++) weights[i] = {rows.scores + i * kTile * kBlockKeys + pair, 4 * kBlockKeys};
        for (int i = 0; i < kChannels; i++)
            of_values[i] = {rows.packed_values + (int64_t)pair * rows.value_dim + d + i * kTile, 4 * rows.value_dim};
        Sums::add(weights, of_values);
    }
    Sums::store(values + d, rows.value_dim);
}

// Rows [row, row + count) of the task, in kRows tiles, meet a block.
template <int kRows>
void meet_tiles(const Block& block, const TileAt* keys, float scale, const Rows& rows, int row, int count) {
    const Seen<kMostTileRows> seen = seen_by<kMostTileRows>(block, rows, row, count);
    if (seen.first >= seen.end) return;
    const Lanes lanes = lanes_of<TileProducts>(seen.first, seen.end);
    const float* q = rows.q + (int64_t)row * rows.dim;
    if (kRows == 1 && lanes.end - lanes.first == 4)
        score_tiles<4, 1>(keys, q, rows.dim, scale, rows.scores);
    else
        for (int tile = lanes.first; tile < lanes.end; tile += 2)
            score_tiles<2, kRows>(keys + tile, q, rows.dim, scale, rows.scores + tile * kTile);
    float* values = rows.values + (int64_t)row * rows.value_dim;
    const auto weigh_some = [&](int first, auto size) {
        constexpr int kSome = decltype(size)::value;
        Seen<kSome> some;
        some.first = seen.first;
        some.end = seen.end;
        memcpy(some.firsts, seen.firsts + first, sizeof some.firsts);
        memcpy(some.ends, seen.ends + first, sizeof some.ends);
        float factors[kSome];
        weigh<TileProducts, kSome>(rows.scores + first * kBlockKeys, some, rows.top + row + first,
                                   rows.sum + row + first, factors);
        for (int r = 0; r < kSome; r++) {
            float* of_row = values + (int64_t)(first + r) * rows.value_dim;
            if (factors[r] == 1) continue;
            for (int d = 0; d < rows.value_dim; d += kLanes) store(of_row + d, load(of_row + d) * all(factors[r]));
        }
    };
    int r = 0;
    for (; r + 4 <= count; r += 4) weigh_some(r, Count<4>{});
    for (; r < count; r++) weigh_some(r, Count<1>{});
    constexpr int kChannels = 4 / kRows;
    int d = 0;
    for (; d + kChannels * kTile <= rows.value_dim; d += kChannels * kTile) add_tiles<kRows, kChannels>(lanes, rows, values, d);
    for (; d < rows.value_dim; d += kTile) add_tiles<kRows, 1>(lanes, rows, values, d);
}

template <>
void meet_all<TileProducts>(Block& block, const Block* next, const PlanView& plan, const Task& task, float scale,
                            const Rows& rows) {
    TileAt keys[kBlockKeys / kTile];
    locate_tiles(block, next, *plan.work, rows, keys);
    pack_value_pairs(block, next, *plan.work, rows);
    clear_other_pairs(block, rows);
    for (int row = 0; row < task.num_rows; row += kMostTileRows) {
        const int count = (int)least(task.num_rows - row, kMostTileRows);
        if (count > kTile)
            meet_tiles<2>(block, keys, scale, rows, row, count);
        else
            meet_tiles<1>(block, keys, scale, rows, row, count);
    }
}
#endif

template <class P>
void run(const PlanView& plan, const DsAttend& call, const Task& task, const Scratch& scratch) {
    const DsWork& work = *plan.work;
    const Rows rows = rows_in(scratch, plan.max_rows, P::slots(work.head_dim), work.value_dim);
    const float scale = call.scale * kLog2E;
    read_rows<P>(plan, call, task, rows);
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
            meet_all<P>(*block, ahead, plan, task, scale, rows);
            Block* done = block;
            block = next;
            next = done;
        }
        end_split(plan, task, scratch, rows, split);
    }
    if (!plan.segments[task.segment].keeps_parts) end_rows(plan, call, task, rows);
}

#if defined(DELTASERVE_TILES)
void run_task(const PlanView& plan, const DsAttend& call, const Task& task, const Scratch& scratch) {
    if (!TileProducts::fits(call, *plan.work)) return attention_avx512_bf16.run_task(plan, call, task, scratch);
    const Tiles tiles;
    run<TileProducts>(plan, call, task, scratch);
}
#else
template <class P>
void run_rows(const PlanView& plan, const DsAttend& call, const Task& task, const Scratch& scratch) {
    return plan.segments[task.segment].is_long && task.num_rows > kFewRows
               ? run<OneChain<P>>(plan, call, task, scratch)
               : run<P>(plan, call, task, scratch);
}

void run_task(const PlanView& plan, const DsAttend& call, const Task& task, const Scratch& scratch) {
#if defined(__AVX512BF16__)
    if (call.kv_type == DS_BFLOAT16 && call.q_type == DS_BFLOAT16 && plan.work->head_dim % 2 == 0)
        return task.num_rows <= kTileRows && plan.work->head_dim % 32 == 0 && plan.work->value_dim % 32 == 0
                   ? run<PairProducts<true>>(plan, call, task, scratch)
                   : run_rows<PairProducts<false>>(plan, call, task, scratch);
#endif
    switch (call.kv_type) {
        case DS_FLOAT32: return run_rows<Products<Float32>>(plan, call, task, scratch);
        case DS_BFLOAT16: return run_rows<Products<BFloat16>>(plan, call, task, scratch);
        case DS_FLOAT16: return run_rows<Products<Float16>>(plan, call, task, scratch);
        default: return run_rows<Products<Float8>>(plan, call, task, scratch);
    }
}
#endif

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
