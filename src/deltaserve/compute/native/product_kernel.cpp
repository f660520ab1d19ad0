// Products of few rows with packed matrices. Compiled once per instruction set (compile_library.py).
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

#define DS_JOIN(a, b) a##b
#define DS_NAME(prefix, isa) DS_JOIN(prefix, isa)

namespace deltaserve {

namespace {

constexpr int kTileRows = 6;
constexpr int kDepthBytes = 256;  // of a column: 16 KiB of a panel at once

DS_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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

template <class E> void write_rows(const DsProduct& call, int64_t column, const float* totals) {
    const int64_t end = least(kPanel, call.num_columns - column);
    for (int64_t row = 0; row < call.num_rows; row++)
        for (int64_t c = 0; c < end; c += kLanes) {
            Vec x = load(totals + row * kPanel + c);
            if (call.bias != nullptr) x += load_some<E>(at<E>(call.bias, column), c, end - c);
            store_some<E>(at<E>(call.out, row * call.num_columns + column), c, end - c, x);
        }
}

template <class F> void multiply_panels(const DsProduct& call, int64_t first, int64_t end) {
    const int64_t block = kLanes == 16 && call.depth <= 1024 ? 512 : 1024;
    alignas(64) float totals[kProductRows * kPanel], sums[kProductRows * kPanel];
    for (int64_t i = first; i < end; i++) {
        const uint8_t* panel = (const uint8_t*)call.panels + i * call.panel_depth * kPanel * F::Element::kBytes;
        multiply_block<F>(call, panel, 0, least(block, call.depth), totals);
        for (int64_t k = block; k < call.depth; k += block) {
            multiply_block<F>(call, panel, k, least(k + block, call.depth), sums);
            for (int64_t j = 0; j < call.num_rows * kPanel; j++) totals[j] += sums[j];
        }
        write_rows<typename F::Element>(call, i * kPanel, totals);
    }
}

#if defined(DELTASERVE_TILES)
// Bfloat16 in tile registers: a panel is four tiles of columns as it lies, rows are read as they lie, 16 at a time. The
// last 16 rows may be some of the 16 before once more: each has sums of its own.
constexpr int64_t kManyDepth = 256;  // factors of a panel that stay in the first cache for several tiles of rows
constexpr int64_t kLinesAhead = 128;

void multiply_tile_rows(const DsProduct& call, const uint8_t* panel, int64_t row, int64_t start, int64_t end, bool starts,
                        bool fetches, float* sums) {
    using Sums = TileSums<1, 4>;
    if (starts)
        Sums::clear();
    else
        Sums::load(sums, kPanel);
    for (int64_t k = start; k < end; k += kTilePair) {
        const uint8_t* at = panel + k * kPanel * 2;
        if (fetches)
            for (int64_t line = 0; line < kTile * 4; line++) __builtin_prefetch(at + 64 * (kLinesAhead + line));
        const TileAt rows = {(const uint8_t*)call.x + 2 * (row * call.x_stride + k), 2 * call.x_stride};
        TileAt columns[4];
        for (int i = 0; i < 4; i++) columns[i] = {at + i * kTileBytes, 4 * kPanel};
        Sums::add(&rows, columns);
    }
    Sums::store(sums, kPanel);
}

void multiply_tile_panels(const DsProduct& call, int64_t first, int64_t end) {
    if (call.depth % kTilePair != 0 || call.num_rows == 0) return product_avx512_bf16.of_bfloat16(call, first, end);
    const int64_t tile_rows = least(kTile, call.num_rows), num_tiles = (call.num_rows + kTile - 1) / kTile;
    const int64_t chunk = num_tiles == 1 ? call.depth : kManyDepth;
    const Tiles tiles((int)tile_rows);
    alignas(64) float sums[kProductRows * kPanel];  // [tile of rows][row][column]
    for (int64_t i = first; i < end; i++) {
        const uint8_t* panel = (const uint8_t*)call.panels + i * call.panel_depth * kPanel * 2;
        for (int64_t k = 0; k < call.depth; k += chunk)
            for (int64_t tile = 0; tile < num_tiles; tile++)
                multiply_tile_rows(call, panel, least(tile * kTile, call.num_rows - tile_rows), k,
                                   least(k + chunk, call.depth), k == 0, tile == 0, sums + tile * kTile * kPanel);
        const int64_t again = num_tiles * kTile - call.num_rows;  // rows of the last tile that the one before has, too
        if (num_tiles > 1 && again != 0)
            memmove(sums + (num_tiles - 1) * kTile * kPanel, sums + ((num_tiles - 1) * kTile + again) * kPanel,
                    sizeof(float) * (kTile - again) * kPanel);
        write_rows<BFloat16>(call, i * kPanel, sums);
    }
}

constexpr auto kOfBFloat16 = multiply_tile_panels;
#elif defined(__AVX512F__)
constexpr auto kOfBFloat16 = multiply_panels<OfBFloat16>;
#else
constexpr void (*kOfBFloat16)(const DsProduct&, int64_t, int64_t) = nullptr;
#endif

}  // namespace

extern const ProductKernel DS_NAME(product_, DELTASERVE_ISA) = {multiply_panels<OfFloat32>, kOfBFloat16};

}  // namespace deltaserve
