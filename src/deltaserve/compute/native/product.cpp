// Runs products on the threads of a context, with the kernels of one instruction set.

#include "context.h"
#include "kernels.h"

using namespace deltaserve;

namespace {

constexpr TaskSizes kPanelBytes = {512 << 10, 256 << 10};  // for a few rows

const ProductKernel* kernel_of(int isa) {
    const Kernels* kernels = kernels_of(isa);
    return kernels == nullptr ? nullptr : kernels->product;
}

using Multiply = void (*)(const DsProduct&, int64_t, int64_t);

Multiply multiply_of(int isa, int32_t type) {
    const ProductKernel* kernel = kernel_of(isa);
    if (kernel == nullptr) return nullptr;
    if (type == DS_FLOAT32) return kernel->of_float32;
#if defined(__x86_64__)
    if (type == DS_BFLOAT16 && __builtin_cpu_supports("avx512bf16")) return kernel->of_bfloat16;
#endif
    return nullptr;
}

}  // namespace

bool ds_can_multiply(int isa, int type) { return multiply_of(isa, type) != nullptr; }

bool ds_product(DsContext* context, int isa, const DsProduct* call) {
    const Multiply multiply = multiply_of(isa, call->type);
    const bool is_whole = call->type == DS_FLOAT32 || call->depth % 2 == 0;
    if (multiply == nullptr || !is_whole || call->num_rows > kProductRows) return false;
    const int64_t num_panels = (call->num_columns + kPanel - 1) / kPanel;
    const int64_t panel_bytes = kPanel * call->panel_depth * (call->type == DS_FLOAT32 ? 4 : 2);
    const int64_t work = panel_bytes * (1 + call->num_rows / 16);
    context->pool.run_ranges(num_panels, work, kPanelBytes,
                             [&](int64_t first, int64_t end, int) { multiply(*call, first, end); });
    return true;
}
