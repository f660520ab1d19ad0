// Products of few rows with packed matrices, in plain structures: see attention_kernel.h for why.
#pragma once
#include <stdint.h>

#include "native.h"

namespace deltaserve {

constexpr int kPanel = 64;        // columns of a product that lie together
constexpr int kProductRows = 64;  // most that a call has

// One for each instruction set; each function computes panels first <= panel < end. Null for a type that it cannot multiply.
struct ProductKernel {
    void (*of_float32)(const DsProduct& call, int64_t first, int64_t end);
    void (*of_bfloat16)(const DsProduct& call, int64_t first, int64_t end);  // needs AVX512-BF16
};

extern const ProductKernel product_generic, product_avx2, product_avx512, product_avx512_bf16, product_amx_bf16;

}  // namespace deltaserve
