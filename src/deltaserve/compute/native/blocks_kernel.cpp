// Products with matrices of codes (blocks_kernel.h). Compiled once per instruction set (compile_library.py).
//
// With x as it is, codes become floats in registers, in as many operations as there are codes in a vector; many rows meet
// codes that are floats in memory already, which gives the same bits. With x rounded to int8, products of a run are whole
// numbers and exact, whatever the instructions: what VNNI does in one, others do in halves of a byte, so that sums of 16
// bits hold them. What comes next is fetched meanwhile: the arithmetic of several rows hides it from the processor.
#include "blocks_kernel.h"

#include "rows.h"

namespace deltaserve {

namespace {

#if defined(__AVX512F__)
constexpr int kVectors = 2;  // of columns, in registers
#else
constexpr int kVectors = 1;
#endif
constexpr int kPass = kVectors * kLanes;
#if defined(__AVX2__)
constexpr int64_t kDirectRows = 8 * kBlockRows;  // more of them meet expanded codes
#else
constexpr int64_t kDirectRows = 2 * kBlockRows;
#endif

// What is read next but for so many bytes: panels lie one behind the other.
constexpr int64_t kAhead = 4096;

DS_INLINE void prefetch(const uint8_t* from, int64_t size) {
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(from + i);
}

// A tile of rows and some runs of a panel.
struct Tile {
    const DsBlocks* blocks;
    const PreparedRows* rows;
    const uint8_t* panel;   // its first run
    const float* expanded;  // codes of `first_run` and those behind it
    int64_t row;
    bool is_first;  // of those that meet these runs
    int64_t first_run, end_run;
    float* totals;  // [row][kBlockColumns]
};

DS_INLINE Vec load_scale(const DsBlocks& blocks, const uint8_t* scales, int column) {
    return blocks.scale_type == DS_FLOAT16 ? Float16::load(scales + 2 * column) : Float32::load(scales + 4 * column);
}

// Loops over registers, which must not stay loops.
#define DS_UNROLL _Pragma("GCC unroll 8")

// What a run adds to the results of a tile: its parts times the scales of its columns, and offsets times the sums of x.
// `part(r, v, scale, total)` is the first with what there is already.
template <bool kOffsets, int kRows, class Part>
DS_INLINE void add_run(const DsBlocks& blocks, const uint8_t* run, int column, const float* sums, float* totals, Part part) {
    Vec scales[kVectors], offsets[kVectors];
    DS_UNROLL for (int v = 0; v < kVectors; v++) {
        scales[v] = load_scale(blocks, run, column + v * kLanes);
        if (kOffsets) offsets[v] = load_scale(blocks, run + scales_bytes(blocks), column + v * kLanes);
    }
    DS_UNROLL for (int r = 0; r < kRows; r++) {
        DS_UNROLL for (int v = 0; v < kVectors; v++) {
            float* total = totals + r * kBlockColumns + column + v * kLanes;
            Vec sum = part(r, v, scales[v], load(total));
            if (kOffsets) sum = multiply_add(offsets[v], all(sums[r]), sum);
            store(total, sum);
        }
    }
}

// Codes of a word as floats, less `zero`: 2^23 + code is exact, and has it in its last bits.
template <int kBits> DS_INLINE Vec code_of(WordVec words, int index, Vec shift) {
    const int position = kBits == 8 ? 8 * index : 8 * (index & 3) + (index & 4);
    return (Vec)((words >> position & (kBits == 8 ? 0xffu : 0xfu)) | 0x4b000000u) - shift;
}

template <int kBits> struct Packed {
    static constexpr int kCodes = 32 / kBits;  // of a word
    Vec shift;
    const uint8_t* codes;
    WordVec words[kVectors];

    DS_INLINE Packed(const Tile& tile, int64_t, const uint8_t* run) {
        shift = all(8388608.f + (float)tile.blocks->zero);
        codes = run + codes_start(*tile.blocks);
    }
    DS_INLINE void open(int64_t k, int column) {
        for (int v = 0; v < kVectors; v++)
            words[v] = load_as<WordVec>(codes + 4 * (k / kCodes * kBlockColumns + column + v * kLanes));
    }
    DS_INLINE Vec factor(int64_t, int index, int v, int) const { return code_of<kBits>(words[v], index, shift); }
};

struct Expanded {
    static constexpr int kCodes = 4;
    const float* codes;

    DS_INLINE Expanded(const Tile& tile, int64_t run, const uint8_t*) {
        codes = tile.expanded + (run - tile.first_run) * tile.blocks->run_len * kBlockColumns;
    }
    DS_INLINE void open(int64_t, int) {}
    DS_INLINE Vec factor(int64_t k, int index, int v, int column) const {
        return load(codes + (k + index) * kBlockColumns + column + v * kLanes);
    }
};

template <class Codes> struct Exact {
    template <int kRows> static void multiply(const Tile& tile) {
        const DsBlocks blocks = *tile.blocks;
        const int64_t run_len = blocks.run_len, size = run_bytes(blocks), end = tile.end_run;
        const float* const values = tile.rows->values + tile.row * blocks.depth;
        const float* const sums = tile.rows->sums + tile.row * (blocks.depth / run_len);
        float* const totals = tile.totals;
        for (int column = 0; column < kBlockColumns; column += kPass)
            for (int64_t i = tile.first_run; i < end; i++) {
                const uint8_t* run = tile.panel + i * size;
                if (column == 0 && tile.is_first) prefetch(run + kAhead, size);
                Codes codes(tile, i, run);
                Vec parts[kRows][kVectors] = {};
                const float* x = values + i * run_len * kRows;
                for (int64_t k = 0; k < run_len; k += Codes::kCodes) {
                    codes.open(k, column);
                    DS_UNROLL for (int j = 0; j < Codes::kCodes; j++) {
                        Vec factors[kVectors];
                        DS_UNROLL for (int v = 0; v < kVectors; v++) factors[v] = codes.factor(k, j, v, column);
                        DS_UNROLL for (int r = 0; r < kRows; r++) {
                            const Vec value = all(x[(k + j) * kRows + r]);
                            DS_UNROLL for (int v = 0; v < kVectors; v++)
                                parts[r][v] = multiply_add(value, factors[v], parts[r][v]);
                        }
                    }
                }
                const auto part = [&](int r, int v, Vec scale, Vec total) {
                    return multiply_add(parts[r][v], scale, total);
                };
                if (blocks.has_offsets)
                    add_run<true, kRows>(blocks, run, column, sums + i * kRows, totals, part);
                else
                    add_run<false, kRows>(blocks, run, column, nullptr, totals, part);
            }
    }
};

constexpr uint32_t kHalves = 0x0f0f0f0fu;

// Sums of products of codes with int8, of one vector of columns.
#if defined(__AVX512VNNI__)

struct Sums {
    IntVec total;

    DS_INLINE void start(int32_t from) { total = (IntVec)_mm512_set1_epi32(from); }
    DS_INLINE void add(WordVec words, int32_t x) {
        total = (IntVec)_mm512_dpbusd_epi32((__m512i)total, (__m512i)words, _mm512_set1_epi32(x));
    }
    template <int kBits> DS_INLINE void add_words(WordVec words, int32_t x, int32_t next) {
        if (kBits == 8) return add(words, x);
        add(words & kHalves, x);
        add(words >> 4 & kHalves, next);
    }
    DS_INLINE IntVec end() const { return total; }
};

#elif defined(__AVX2__)

#if defined(__AVX512F__)
DS_INLINE IntVec pairs(WordVec codes, int32_t x) {
    return (IntVec)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(x));
}
DS_INLINE IntVec add_pairs(IntVec a, IntVec b) { return (IntVec)_mm512_add_epi16((__m512i)a, (__m512i)b); }
DS_INLINE IntVec meet_pairs(IntVec a, int16_t factor) {
    return (IntVec)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(factor));
}
#else
DS_INLINE IntVec pairs(WordVec codes, int32_t x) {
    return (IntVec)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(x));
}
DS_INLINE IntVec add_pairs(IntVec a, IntVec b) { return (IntVec)_mm256_add_epi16((__m256i)a, (__m256i)b); }
DS_INLINE IntVec meet_pairs(IntVec a, int16_t factor) {
    return (IntVec)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(factor));
}
#endif

// A pair's sum is at most 2 * 15 * 127, and a run adds eight of them: they fit into 16 bits.
struct Sums {
    int32_t first;
    IntVec low, high;

    DS_INLINE void start(int32_t from) {
        first = from;
        low = high = IntVec{};
    }
    template <int kBits> DS_INLINE void add_words(WordVec words, int32_t x, int32_t next) {
        low = add_pairs(low, pairs(words & kHalves, x));
        const IntVec rest = pairs(words >> 4 & kHalves, kBits == 8 ? x : next);
        if (kBits == 8)
            high = add_pairs(high, rest);
        else
            low = add_pairs(low, rest);
    }
    DS_INLINE IntVec end() const { return meet_pairs(low, 1) + meet_pairs(high, 16) + first; }
};

#else

DS_INLINE int32_t byte_of(int32_t word, int index) { return (int8_t)(word >> 8 * index); }

struct Sums {
    IntVec total;

    DS_INLINE void start(int32_t from) { total = IntVec{} + from; }
    template <int kBits> DS_INLINE void add_words(WordVec words, int32_t x, int32_t next) {
        for (int j = 0; j < 4; j++) {
            const IntVec code = (IntVec)(words >> 8 * j & 0xffu);
            if (kBits == 8)
                total += code * byte_of(x, j);
            else
                total += (code & 15) * byte_of(x, j) + (code >> 4) * byte_of(next, j);
        }
    }
    DS_INLINE IntVec end() const { return total; }
};

#endif

template <int kBits> struct Rounded {
    template <int kRows> static void multiply(const Tile& tile) {
        constexpr int kCodes = 32 / kBits;
        const DsBlocks blocks = *tile.blocks;
        const PreparedRows rows = *tile.rows;
        const int64_t run_len = blocks.run_len, size = run_bytes(blocks), end = tile.end_run;
        const int64_t first_run = tile.row * (blocks.depth / run_len);
        const int32_t* const values = rows.codes + tile.row * (blocks.depth / 4);
        const int32_t* const starts = rows.starts + first_run;
        const float* const sums = rows.sums + first_run;
        const float* const of_rows = rows.scales + tile.row * (blocks.depth / kRoundedLen);
        float* const totals = tile.totals;
        for (int column = 0; column < kBlockColumns; column += kPass)
            for (int64_t i = tile.first_run; i < end; i++) {
                const uint8_t* run = tile.panel + i * size;
                if (column == 0 && tile.is_first) prefetch(run + kAhead, size);
                const uint8_t* words = run + codes_start(blocks) + 4 * column;
                const int32_t* four = values + i * (run_len / 4) * kRows;
                Sums parts[kRows][kVectors];
                DS_UNROLL for (int r = 0; r < kRows; r++) {
                    DS_UNROLL for (int v = 0; v < kVectors; v++) parts[r][v].start(starts[i * kRows + r]);
                }
                for (int64_t k = 0; k < run_len; k += kCodes) {
                    WordVec codes[kVectors];
                    DS_UNROLL for (int v = 0; v < kVectors; v++) codes[v] = load_as<WordVec>(words + 4 * v * kLanes);
                    DS_UNROLL for (int r = 0; r < kRows; r++) {
                        DS_UNROLL for (int v = 0; v < kVectors; v++)
                            parts[r][v].template add_words<kBits>(codes[v], four[r], kBits == 4 ? four[kRows + r] : 0);
                    }
                    words += 4 * kBlockColumns;
                    four += kCodes / 4 * kRows;
                }
                const float* row_scales = of_rows + i * run_len / kRoundedLen * kRows;
                const auto part = [&](int r, int v, Vec scale, Vec total) {
                    const Vec sum = __builtin_convertvector(parts[r][v].end(), Vec);
                    return multiply_add(sum, scale * all(row_scales[r]), total);
                };
                if (blocks.has_offsets)
                    add_run<true, kRows>(blocks, run, column, sums + i * kRows, totals, part);
                else
                    add_run<false, kRows>(blocks, run, column, nullptr, totals, part);
            }
    }
};

template <class F> void multiply_rows(const Tile& tile, int64_t num_rows) {
    switch (num_rows) {
        case 1: return F::template multiply<1>(tile);
        case 2: return F::template multiply<2>(tile);
        case 3: return F::template multiply<3>(tile);
        case 4: return F::template multiply<4>(tile);
        case 5: return F::template multiply<5>(tile);
        case 6: return F::template multiply<6>(tile);
        case 7: return F::template multiply<7>(tile);
        default: return F::template multiply<8>(tile);
    }
}

// Tiles first <= i < end of x, their results one behind the other from `tile.totals` on.
template <class F> void multiply_tiles(Tile tile, int64_t num_rows, int64_t first, int64_t end) {
    tile.is_first = true;
    for (int64_t i = first; i < end; i++, tile.is_first = false) {
        tile.row = tile_start(num_rows, i);
        const int64_t height = tile_start(num_rows, i + 1) - tile.row;
        multiply_rows<F>(tile, height);
        tile.totals += height * kBlockColumns;
    }
}

template <int kBits> void expand(const Tile& tile, float* to) {
    const DsBlocks& blocks = *tile.blocks;
    constexpr int kCodes = 32 / kBits;
    const Vec shift = all(8388608.f + (float)blocks.zero);
    for (int64_t i = tile.first_run; i < tile.end_run; i++) {
        const uint8_t* codes = tile.panel + i * run_bytes(blocks) + codes_start(blocks);
        for (int64_t k = 0; k < blocks.run_len; k += kCodes, to += kCodes * kBlockColumns)
            for (int column = 0; column < kBlockColumns; column += kLanes) {
                const WordVec words = load_as<WordVec>(codes + 4 * (k / kCodes * kBlockColumns + column));
                for (int j = 0; j < kCodes; j++)
                    store(to + j * kBlockColumns + column, code_of<kBits>(words, j, shift));
            }
    }
}

template <class E> void write_rows(const DsBlockProduct& call, int64_t first, int64_t num_rows, int64_t column,
                                   const float* totals) {
    const int64_t end = least(kBlockColumns, call.blocks.num_columns - column);
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t c = 0; c < end; c += kLanes) {
            Vec x = load(totals + row * kBlockColumns + c);
            if (call.bias != nullptr) x += load_some<E>(at<E>(call.bias, column), c, end - c);
            store_some<E>(at<E>(call.out, (first + row) * call.out_stride + column), c, end - c, x);
        }
}

// Some runs of a panel, added to what results of tiles first <= i < end are so far.
template <int kBits>
void multiply_runs(const DsBlockProduct& call, Tile tile, int64_t first, int64_t end, float* expanded) {
    const int64_t num_rows = call.num_rows;
    if (call.rounds) return multiply_tiles<Rounded<kBits>>(tile, num_rows, first, end);
    if (num_rows <= kDirectRows) return multiply_tiles<Exact<Packed<kBits>>>(tile, num_rows, first, end);
    tile.expanded = expanded;
    expand<kBits>(tile, expanded);
    multiply_tiles<Exact<Expanded>>(tile, num_rows, first, end);
}

template <int kBits, class E>
void multiply_panels(const DsBlockProduct& call, const PreparedRows& rows, int64_t first, int64_t end, float* scratch) {
    const DsBlocks& blocks = call.blocks;
    const bool is_direct = call.rounds || call.num_rows <= kDirectRows;
    const int64_t num_runs = blocks.depth / blocks.run_len, step = is_direct ? num_runs : kExpandedLen / blocks.run_len;
    const int64_t num_tiles = tile_count(call.num_rows);
    float* expanded = scratch + kTilesAtOnce * kBlockRows * kBlockColumns;
    Tile tile = {};
    tile.blocks = &blocks;
    tile.rows = &rows;
    tile.totals = scratch;
    for (int64_t i = first; i < end; i++)
        for (int64_t from = 0; from < num_tiles; from += kTilesAtOnce) {
            const int64_t to = least(num_tiles, from + kTilesAtOnce), row = tile_start(call.num_rows, from);
            const int64_t num_rows = tile_start(call.num_rows, to) - row;
            tile.panel = (const uint8_t*)blocks.panels + i * panel_bytes(blocks);
            memset(scratch, 0, sizeof(float) * num_rows * kBlockColumns);
            for (int64_t run = 0; run < num_runs; run += step) {
                tile.first_run = run;
                tile.end_run = least(num_runs, run + step);
                multiply_runs<kBits>(call, tile, from, to, expanded);
            }
            write_rows<E>(call, row, num_rows, i * kBlockColumns, scratch);
        }
}

void multiply(const DsBlockProduct& call, const PreparedRows& rows, int64_t first, int64_t end, float* scratch) {
    const bool is_float = call.type == DS_FLOAT32, is_short = call.blocks.bits == 4;
    const auto of_type = is_float ? (is_short ? multiply_panels<4, Float32> : multiply_panels<8, Float32>)
                                  : (is_short ? multiply_panels<4, BFloat16> : multiply_panels<8, BFloat16>);
    of_type(call, rows, first, end, scratch);
}

// Rows of a tile as they are, and sums of runs.
template <class E> void prepare_exact(const DsBlockProduct& call, const PreparedRows& rows, int64_t tile) {
    const DsBlocks& blocks = call.blocks;
    const int64_t first = tile_start(call.num_rows, tile), num_rows = tile_start(call.num_rows, tile + 1) - first;
    for (int64_t r = 0; r < num_rows; r++) {
        const uint8_t* x = at<E>(call.x, (first + r) * call.x_stride);
        float* values = rows.values + first * blocks.depth + r;
        float* sums = rows.sums + first * (blocks.depth / blocks.run_len) + r;
        for (int64_t k = 0; k < blocks.depth; sums += num_rows) {
            Vec sum = {};
            for (const int64_t end = k + blocks.run_len; k < end; k += kLanes) {
                const Vec value = E::load(x + k * E::kBytes);
                for (int j = 0; j < kLanes; j++) values[(k + j) * num_rows] = value[j];
                sum += value;
            }
            if (blocks.has_offsets) *sums = sum_of(sum);
        }
    }
}

constexpr float kLeast = 1e-30f;  // what is smaller is rounded to 0: float32 has no factor that would make it 127

// Kept values of one run of int8: its scale, which is not a number where a value is not finite.
template <class E> float round_values(const uint8_t* x, int8_t* codes) {
    Vec largest = {}, check = {};
    for (int k = 0; k < kRoundedLen; k += kLanes) {
        const Vec value = E::load(x + k * E::kBytes);
        largest = larger(larger(value, -value), largest);
        check += value - value;  // not a number where the value is not finite
    }
    const float most = largest_of(largest), difference = sum_of(check);
    if (!(difference == 0.f)) {
        memset(codes, 0, kRoundedLen);
        return difference;
    }
    const float factor = most < kLeast ? 0.f : 127.f / most;
    const Vec shift = all(12582912.f);  // 1.5 * 2^23: the sum's last bits are the value rounded to an integer
    for (int k = 0; k < kRoundedLen; k += kLanes) {
        const WordVec whole = (WordVec)(E::load(x + k * E::kBytes) * all(factor) + shift);
        const ByteVec bytes = __builtin_convertvector(whole, ByteVec);
        memcpy(codes + k, &bytes, kLanes);
    }
    return most < kLeast ? 0.f : most / 127.f;
}

// The same rounded.
template <class E> void prepare_rounded(const DsBlockProduct& call, const PreparedRows& rows, int64_t tile) {
    const DsBlocks& blocks = call.blocks;
    const int64_t first = tile_start(call.num_rows, tile), num_rows = tile_start(call.num_rows, tile + 1) - first;
    const int64_t num_runs = blocks.depth / blocks.run_len;
    for (int64_t r = 0; r < num_rows; r++)
        for (int64_t k = 0; k < blocks.depth; k += kRoundedLen) {
            int8_t codes[kRoundedLen];
            const float scale = round_values<E>(at<E>(call.x, (first + r) * call.x_stride + k), codes);
            rows.scales[(first * blocks.depth + k * num_rows) / kRoundedLen + r] = scale;
            for (int64_t j = 0; j < kRoundedLen; j += 4)
                memcpy(rows.codes + (first * blocks.depth + (k + j) * num_rows) / 4 + r, codes + j, 4);
            for (int64_t part = 0; part < kRoundedLen; part += blocks.run_len) {
                int32_t sum = 0;
                for (int64_t j = part; j < part + blocks.run_len; j++) sum += codes[j];
                const int64_t run = first * num_runs + (k + part) / blocks.run_len * num_rows + r;
                rows.starts[run] = -blocks.zero * sum;
                if (blocks.has_offsets) rows.sums[run] = scale * (float)sum;
            }
        }
}

void prepare(const DsBlockProduct& call, const PreparedRows& rows, int64_t first, int64_t end) {
    const bool is_float = call.type == DS_FLOAT32;
    const auto one = call.rounds ? (is_float ? prepare_rounded<Float32> : prepare_rounded<BFloat16>)
                                 : (is_float ? prepare_exact<Float32> : prepare_exact<BFloat16>);
    for (int64_t tile = first; tile < end; tile++) one(call, rows, tile);
}

}  // namespace

extern const BlocksKernel DS_NAME(blocks_, DELTASERVE_ISA) = {prepare, multiply};

}  // namespace deltaserve
