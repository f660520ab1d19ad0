// Products with packed matrices, in plain structures: see attention_kernel.h for why.
#pragma once
#include <stdint.h>

#include "native.h"

namespace deltaserve {

constexpr int kPanel = 64;      // columns of a product that lie together
constexpr int kRowTile = 16;    // blocks of rows are cut between tiles
constexpr int kPanelGroup = 4;  // panels that several tiles of rows meet in turns

// Products of one type.
struct TypeProduct {
    // Computes panels first <= panel < end; null where the instruction set cannot. `scratch`: of the thread.
    void (*multiply)(const DsProduct& call, int64_t first, int64_t end, float* scratch);
    int64_t block_rows;      // most that a call has
    int64_t depth_step;      // divides the depth of a call
    int64_t scratch_floats;  // of each thread, for a call of several tiles of rows
    int64_t few_rows;        // up to so many oneDNN is not faster (measured)
};

// One for each instruction set.
struct ProductKernel {
    TypeProduct of_float32;
    TypeProduct of_bfloat16;  // needs AVX512-BF16
};

extern const ProductKernel product_generic, product_avx2, product_avx512, product_avx512_bf16, product_amx_bf16;

}  // namespace deltaserve
