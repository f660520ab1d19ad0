// Products with matrices of codes, in plain structures: see attention_kernel.h for why.
//
// A weight is scale * (code - zero) + offset, scale and offset those of a run of 16 or 32 weights of a row. Codes stay whole
// numbers as long as they can: a run's part of a result is the sum of x * (code - zero), and meets its scale once. It is
// computed alike for any number of rows, so a row's bits do not depend on the others.
#pragma once
#include <stdint.h>

#include "native.h"

namespace deltaserve {

constexpr int kBlockColumns = 32;     // of a product that lie together: a panel
constexpr int kBlockRows = 8;         // of x that meet a code while it is in registers, at most: a tile
constexpr int kRoundedLen = 32;       // values of x that are rounded to int8 with one scale
constexpr int64_t kTilesAtOnce = 32;   // whose results of a panel are in work together
constexpr int64_t kExpandedLen = 512;  // depth of what is expanded at once, where many rows meet it

// Rows of x are cut into as few tiles as there may be, of about equal height: to make floats of codes takes as long as to
// multiply them with three or four rows, so a tile of one row would cost as much as one of four.
constexpr int64_t tile_count(int64_t num_rows) { return (num_rows + kBlockRows - 1) / kBlockRows; }
constexpr int64_t tile_start(int64_t num_rows, int64_t tile) { return tile * num_rows / tile_count(num_rows); }

// Rows of x as the kernels take them: in a tile side by side. Arrays that a call does not need are null.
struct PreparedRows {
    float* values;    // [tile][depth][row]
    float* sums;      // [tile][run][row] of x, or of what it was rounded to
    int32_t* codes;   // [tile][depth / 4][row], four of 8 bits
    float* scales;    // [tile][depth / kRoundedLen][row] of codes
    int32_t* starts;  // [tile][run][row]: -zero * sum of the run's codes
};

// Bytes of a run of one panel: scales, offsets, codes; codes lie as words of a column, four of 8 bits in each, or eight of
// 4 bits, of which the first four are the low halves of its bytes.
constexpr int64_t scales_bytes(const DsBlocks& b) { return kBlockColumns * (b.scale_type == DS_FLOAT16 ? 2 : 4); }
constexpr int64_t codes_start(const DsBlocks& b) { return scales_bytes(b) * (b.has_offsets ? 2 : 1); }
constexpr int64_t run_bytes(const DsBlocks& b) { return codes_start(b) + kBlockColumns * b.run_len * b.bits / 8; }
constexpr int64_t panel_bytes(const DsBlocks& b) { return b.depth / b.run_len * run_bytes(b); }

// Floats of scratch memory of a thread.
constexpr int64_t kBlockScratch = kTilesAtOnce * kBlockRows * kBlockColumns + kExpandedLen * kBlockColumns;

struct BlocksKernel {
    // Tiles first <= tile < end of x.
    void (*prepare)(const DsBlockProduct& call, const PreparedRows& rows, int64_t first, int64_t end);
    // Panels first <= panel < end of the product.
    void (*multiply)(const DsBlockProduct& call, const PreparedRows& rows, int64_t first, int64_t end, float* scratch);
};

extern const BlocksKernel blocks_generic, blocks_avx2, blocks_avx512, blocks_avx512_vnni;

}  // namespace deltaserve
