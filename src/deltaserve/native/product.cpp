// Runs products on the threads of a context, with the kernels of one instruction set.
#include <algorithm>

#include "context.h"
#include "kernels.h"

using namespace deltaserve;

namespace {

constexpr int64_t kAloneWork = 1 << 19;  // bytes of panels for a few rows: multiplied as soon as others wake and end (measured)
constexpr int64_t kTaskWork = 256 << 10;

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
    const int64_t block = std::max<int64_t>(1, kTaskWork / std::max<int64_t>(1, work));
    if (num_panels * work <= kAloneWork || context->pool.num_active() == 1) {
        multiply(*call, 0, num_panels);
        return true;
    }
    context->pool.run((num_panels + block - 1) / block, [&](int64_t i, int) {
        multiply(*call, i * block, std::min(num_panels, (i + 1) * block));
    });
    return true;
}
