// Products with packed matrices. Compiled once per instruction set (compile_library.py).
//
// A panel's part of kDepth factors stays in the first cache while tiles of rows meet it, and what comes next is fetched
// into the second meanwhile: in the first it would drive out what is met. Each result is a chain of its own: products are
// added along the depth, in blocks whose sums are added in order. So a row's bits do not depend on the others. The blocks
// are those of oneDNN, which computes calls of more rows.
#include "product_kernel.h"

#include "rows.h"
#if defined(DELTASERVE_TILES)
#include "tiles.h"
#endif

namespace deltaserve {

namespace {

constexpr int kTileRows = 6;
constexpr int64_t kVectorRows = 64;  // of a call, where vectors compute
constexpr int kDepthBytes = 256;  // of a column: 16 KiB of a panel at once

// Part of a panel, for some rows. The sums start at zero, or go on.
struct Tile {
    const uint8_t* x;      // of the first row, first factor
    int64_t row_bytes;     // of x
    const uint8_t* panel;  // first factor
    const uint8_t* ahead;  // what is fetched meanwhile
    int64_t lines_ahead;   // for each 256 bytes of the panel
    int64_t depth;
    float* sums;  // [row][kPanel]
    bool starts;
};

// Float32: [factor][kPanel].
struct OfFloat32 {
    using Element = Float32;
    static constexpr int kVectors = kLanes == 16 ? 4 : 2;  // of a row, in registers

    template <int kRows> static void multiply(const Tile& tile) {
        for (int column = 0; column < kPanel; column += kVectors * kLanes) {
            Vec sums[kRows][kVectors];
            for (int r = 0; r < kRows; r++)
                for (int v = 0; v < kVectors; v++)
                    sums[r][v] = tile.starts ? Vec{} : load(tile.sums + r * kPanel + column + v * kLanes);
            for (int64_t k = 0; k < tile.depth; k++) {
                if (column == 0)
                    for (int64_t i = 0; i < tile.lines_ahead; i++) __builtin_prefetch(tile.ahead + 256 * k + 64 * i, 0, 2);
                const float* weights = (const float*)tile.panel + k * kPanel + column;
                Vec factors[kVectors];
                for (int v = 0; v < kVectors; v++) factors[v] = load(weights + v * kLanes);
                for (int r = 0; r < kRows; r++) {
                    const Vec x = all(((const float*)(tile.x + r * tile.row_bytes))[k]);
                    for (int v = 0; v < kVectors; v++) sums[r][v] = multiply_add(x, factors[v], sums[r][v]);
                }
            }
            for (int r = 0; r < kRows; r++)
                for (int v = 0; v < kVectors; v++) store(tile.sums + r * kPanel + column + v * kLanes, sums[r][v]);
        }
    }
};

#if defined(__AVX512F__)
// Bfloat16: [pair of factors][kPanel][2].
struct OfBFloat16 {
    using Element = BFloat16;

    template <int kRows> __attribute__((target("avx512bf16"))) static void multiply(const Tile& tile) {
        __m512 sums[kRows][4];
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < 4; v++)
                sums[r][v] = tile.starts ? _mm512_setzero_ps() : _mm512_loadu_ps(tile.sums + r * kPanel + v * kLanes);
        for (int64_t k = 0; k < tile.depth / 2; k++) {
            for (int64_t i = 0; i < tile.lines_ahead; i++) __builtin_prefetch(tile.ahead + 256 * k + 64 * i, 0, 2);
            __m512bh factors[4];
            for (int v = 0; v < 4; v++) factors[v] = (__m512bh)_mm512_loadu_si512(tile.panel + 256 * k + 64 * v);
            for (int r = 0; r < kRows; r++) {
                int32_t pair;
                memcpy(&pair, tile.x + r * tile.row_bytes + 4 * k, 4);
                const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                for (int v = 0; v < 4; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], x, factors[v]);
            }
        }
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < 4; v++) _mm512_storeu_ps(tile.sums + r * kPanel + v * kLanes, sums[r][v]);
    }
};
#endif

template <class F> void multiply_rows(const Tile& tile, int64_t num_rows) {
    switch (num_rows) {
        case 1: return F::template multiply<1>(tile);
        case 2: return F::template multiply<2>(tile);
        case 3: return F::template multiply<3>(tile);
        case 4: return F::template multiply<4>(tile);
        case 5: return F::template multiply<5>(tile);
        default: return F::template multiply<kTileRows>(tile);
    }
}

// One block of the depth: sums [row][kPanel].
template <class F> void multiply_block(const DsProduct& call, const uint8_t* panel, int64_t start, int64_t end, float* sums) {
    constexpr int64_t kDepth = kDepthBytes / F::Element::kBytes;
    const int64_t num_tiles = (call.num_rows + kTileRows - 1) / kTileRows;
    for (int64_t k = start; k < end; k += kDepth) {
        Tile tile = {};
        tile.row_bytes = call.x_stride * F::Element::kBytes;
        tile.panel = panel + k * kPanel * F::Element::kBytes;
        tile.depth = least(kDepth, end - k);
        tile.starts = k == start;
        int64_t row = 0, lines = 0;
        for (int64_t i = 0; i < num_tiles; i++) {
            const int64_t next_row = (i + 1) * call.num_rows / num_tiles, next_lines = (i + 1) * 4 / num_tiles;
            tile.x = (const uint8_t*)call.x + row * tile.row_bytes + k * F::Element::kBytes;
            tile.sums = sums + row * kPanel;
            tile.ahead = tile.panel + kDepthBytes * kPanel + 64 * lines;
            tile.lines_ahead = next_lines - lines;
            multiply_rows<F>(tile, next_row - row);
            row = next_row;
            lines = next_lines;
        }
    }
}

template <class E> DS_INLINE void store_two(uint8_t* to, Vec first, Vec second) {
    E::store(to, first);
    E::store(to + kLanes * E::kBytes, second);
}

#if defined(__AVX512BF16__)
// A whole line at once: two halves take a twentieth of a product's time.
template <> DS_INLINE void store_two<BFloat16>(uint8_t* to, Vec first, Vec second) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}
#endif

template <class E> void add_bias(const DsProduct& call, int64_t num_rows, int64_t column, float* totals) {
    const int64_t width = least(kPanel, call.num_columns - column);
    for (int64_t c = 0; c < width; c += kLanes) {
        const Vec bias = load_some<E>(at<E>(call.bias, column), c, width - c);
        for (int64_t row = 0; row < num_rows; row++) store(totals + row * kPanel + c, load(totals + row * kPanel + c) + bias);
    }
}

// Totals [row][kPanel] of rows first <= row < end, which change.
template <class E>
void write_rows(const DsProduct& call, int64_t first, int64_t end, int64_t column, float* totals) {
    if (call.bias != nullptr) add_bias<E>(call, end - first, column, totals);
    const int64_t width = least(kPanel, call.num_columns - column);
    for (int64_t row = first; row < end; row++, totals += kPanel) {
        uint8_t* to = at<E>(call.out, row * call.num_columns + column);
        int64_t c = 0;
        for (; c + 2 * kLanes <= width; c += 2 * kLanes)
            store_two<E>(to + c * E::kBytes, load(totals + c), load(totals + c + kLanes));
        for (; c < width; c += kLanes) store_some<E>(to, c, width - c, load(totals + c));
    }
}

template <class F> void multiply_panels(const DsProduct& call, int64_t first, int64_t end, float*) {
    const int64_t block = kLanes == 16 && call.depth <= 1024 ? 512 : 1024;
    alignas(64) float totals[kVectorRows * kPanel], sums[kVectorRows * kPanel];
    for (int64_t i = first; i < end; i++) {
        const uint8_t* panel = (const uint8_t*)call.panels + i * call.panel_depth * kPanel * F::Element::kBytes;
        multiply_block<F>(call, panel, 0, least(block, call.depth), totals);
        for (int64_t k = block; k < call.depth; k += block) {
            multiply_block<F>(call, panel, k, least(k + block, call.depth), sums);
            for (int64_t j = 0; j < call.num_rows * kPanel; j++) totals[j] += sums[j];
        }
        write_rows<typename F::Element>(call, 0, call.num_rows, i * kPanel, totals);
    }
}

#if defined(DELTASERVE_TILES)
// Bfloat16 in tile registers: a panel is four tiles of columns as it lies, rows are read as they lie, 16 at a time. The
// last 16 rows may be some of the 16 before once more: each has sums of its own.
//
// Sums of many rows go on in memory from one part of the depth to the next, so that a part of a panel stays in the first
// cache while all tiles of rows meet it. Where the second does not hold the rows, a few panels are met in turns, so that
// it holds the same part of the rows. What is added to a sum, and in which order, is the same in any of these parts: a row's bits are, too.
constexpr int64_t kBlockTiles = 16;  // of rows, in one call
constexpr int64_t kBlockSums = kBlockTiles * kTile * kPanel;
constexpr int64_t kPartDepth = 256;      // of a panel: 32 KiB
constexpr int64_t kRowsBytes = 1 << 20;  // that the second cache holds beside the rest
constexpr int64_t kAheadOfOne = 8192;    // bytes that one tile of rows fetches in advance

// Factors start <= k < end of a panel.
struct PanelPart {
    int64_t panel, start, end;
    const uint8_t* ahead;  // what is fetched meanwhile
    int64_t lines_ahead;   // with each tile of factors
    bool comes_before_last;
};

const uint8_t* factors_at(const DsProduct& call, int64_t panel, int64_t k) {
    return (const uint8_t*)call.panels + (panel * call.panel_depth + k) * kPanel * 2;
}

// Where results of up to 16 rows will be written: a store of a line that no cache has waits for memory.
void fetch_results(const DsProduct& call, int64_t row, int64_t panel) {
    for (int64_t i = row; i < least(row + kTile, call.num_rows); i++) {
        const uint8_t* to = at<BFloat16>((const void*)call.out, i * call.num_columns + panel * kPanel);
        for (int64_t byte = 0; byte < 2 * kPanel; byte += 64) __builtin_prefetch(to + byte, 0, 2);
    }
}

// 16 rows from `row` on, or all of fewer. kCache: as __builtin_prefetch counts, where to fetch.
template <int kCache>
void add_products(const DsProduct& call, const PanelPart& part, int64_t row, const uint8_t* ahead) {
    const uint8_t* factors = factors_at(call, part.panel, part.start);
    const int64_t stride = 2 * call.x_stride, num_lines = part.lines_ahead;
    const uint8_t* rows = (const uint8_t*)call.x + row * stride + 2 * part.start;
    const uint8_t* end = factors_at(call, part.panel, part.end);
    for (; factors != end; factors += kTilePair * kPanel * 2, rows += kTileBytes) {
        for (int64_t line = 0; line < num_lines; line++, ahead += 64) __builtin_prefetch(ahead, 0, kCache);
        load_tile<Tiles::kFirstRows>(rows, stride);
        for_each<4>([&](auto n) {
            constexpr int kN = decltype(n)::value, kColumns = Tiles::kFirstColumns + kN % 2;
            load_tile<kColumns>(factors + kN * kTileBytes, 4 * kPanel);
            multiply_tiles<kN, Tiles::kFirstRows, kColumns>();
        });
    }
}

// `sums`: [tile of rows][row][column], not used where a part is the whole depth
template <int kCache> void multiply_part(const DsProduct& call, const PanelPart& part, float* sums) {
    using Sums = TileSums<1, 4>;
    const int64_t height = least(kTile, call.num_rows);
    const int64_t lines_of_tile = (part.end - part.start) / kTilePair * part.lines_ahead;
    for (int64_t row = 0; row < call.num_rows; row += kTile) {
        const int64_t first = least(row, call.num_rows - height);
        float* own = sums + row * kPanel;
        if (part.start == 0)
            Sums::clear();
        else
            Sums::load(own, kPanel);
        if (part.comes_before_last) fetch_results(call, row, part.panel);
        add_products<kCache>(call, part, first, part.ahead + row / kTile * lines_of_tile * 64);
        if (part.end < call.depth) {
            Sums::store(own, kPanel);
            continue;
        }
        alignas(64) float totals[kTile * kPanel];  // what is over need not leave the first cache
        Sums::store(totals, kPanel);
        write_rows<BFloat16>(call, row, first + height, part.panel * kPanel, totals + (row - first) * kPanel);
    }
}

void multiply_one_tile(const DsProduct& call, int64_t first, int64_t end) {
    for (int64_t panel = first; panel < end; panel++)
        multiply_part<3>(call, {panel, 0, call.depth, factors_at(call, panel, 0) + kAheadOfOne, 4 * kTile, false}, nullptr);
}

// Panels in turns, one part of the depth after the other.
void multiply_group(const DsProduct& call, int64_t first, int64_t end, float* scratch) {
    const int64_t num_tiles = (call.num_rows + kTile - 1) / kTile;
    const int64_t num_parts = (call.depth + kPartDepth - 1) / kPartDepth;
    const int64_t part_depth = (call.depth / kTilePair + num_parts - 1) / num_parts * kTilePair;
    for (int64_t start = 0; start < call.depth; start += part_depth) {
        const int64_t stop = least(call.depth, start + part_depth);
        for (int64_t panel = first; panel < end; panel++) {
            const uint8_t* next = panel + 1 < end      ? factors_at(call, panel + 1, start)
                                  : stop < call.depth ? factors_at(call, first, stop)
                                                      : factors_at(call, end, 0);
            const bool comes_before_last = stop < call.depth && stop + part_depth >= call.depth;
            const int64_t lines = (4 * kTile + num_tiles - 1) / num_tiles;
            const PanelPart part = {panel, start, stop, next, lines, comes_before_last};
            multiply_part<2>(call, part, scratch + (panel - first) * kBlockSums);
        }
    }
}

void multiply_tile_panels(const DsProduct& call, int64_t first, int64_t end, float* scratch) {
    const Tiles tiles((int)least(kTile, call.num_rows));
    if (call.num_rows <= kTile) return multiply_one_tile(call, first, end);
    const int64_t at_once = call.num_rows * call.depth * 2 <= kRowsBytes ? 1 : kPanelGroup;
    for (int64_t panel = first; panel < end; panel += at_once)
        multiply_group(call, panel, least(panel + at_once, end), scratch);
}

constexpr TypeProduct kOfBFloat16 = {multiply_tile_panels, kBlockTiles * kTile, kTilePair, kPanelGroup * kBlockSums,
                                     INT64_MAX};
#elif defined(__AVX512F__)
constexpr TypeProduct kOfBFloat16 = {multiply_panels<OfBFloat16>, kVectorRows, 2, 0, kVectorRows};
#else
constexpr TypeProduct kOfBFloat16 = {};
#endif

constexpr TypeProduct kOfFloat32 = {multiply_panels<OfFloat32>, kVectorRows, 1, 0, kVectorRows};

}  // namespace

extern const ProductKernel DS_NAME(product_, DELTASERVE_ISA) = {kOfFloat32, kOfBFloat16};

}  // namespace deltaserve
