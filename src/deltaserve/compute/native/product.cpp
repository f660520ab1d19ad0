// Runs products on the threads of a context, with the kernels of one instruction set.
#include <algorithm>
#include <new>

#include "context.h"
#include "kernels.h"

using namespace deltaserve;

namespace {

constexpr int64_t kAlone = 512 << 10, kTask = 256 << 10;  // bytes of panels for a few rows

bool can_round() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

const TypeProduct* product_of(int isa, int32_t type) {
    const Kernels* kernels = kernels_of(isa);
    if (kernels == nullptr || (type != DS_FLOAT32 && (type != DS_BFLOAT16 || !can_round()))) return nullptr;
    const TypeProduct& found = type == DS_FLOAT32 ? kernels->product->of_float32 : kernels->product->of_bfloat16;
    return found.multiply == nullptr ? nullptr : &found;
}

// That of the next slower instruction set where the depth is no multiple of the step of this one.
const TypeProduct* product_of(int isa, const DsProduct& call) {
    for (; isa >= 0; isa--) {
        const TypeProduct* found = product_of(isa, call.type);
        if (found != nullptr && call.depth % found->depth_step == 0) return found;
    }
    return nullptr;
}

// Rows first <= row < end of a call.
DsProduct rows_of(const DsProduct& call, int64_t first, int64_t end) {
    const int64_t bytes = call.type == DS_FLOAT32 ? 4 : 2;
    DsProduct rows = call;
    rows.x = (const uint8_t*)call.x + first * call.x_stride * bytes;
    rows.out = (uint8_t*)call.out + first * call.num_columns * bytes;
    rows.num_rows = end - first;
    return rows;
}

}  // namespace

int64_t ds_product_rows(int isa, int type) {
    const TypeProduct* product = product_of(isa, type);
    return product == nullptr ? 0 : product->few_rows;
}

bool ds_product(DsContext* context, int isa, const DsProduct* call) {
    const TypeProduct* product = kernels_of(isa) == nullptr ? nullptr : product_of(isa, *call);
    if (product == nullptr || call->depth <= 0) return false;
    const int64_t num_panels = (call->num_columns + kPanel - 1) / kPanel;
    const int64_t panel_bytes = kPanel * call->panel_depth * (call->type == DS_FLOAT32 ? 4 : 2);
    const int64_t group = std::clamp<int64_t>(num_panels / (2 * context->pool.size()), 1, kPanelGroup);
    const int64_t num_tiles = (call->num_rows + kRowTile - 1) / kRowTile;
    const int64_t num_blocks = (call->num_rows + product->block_rows - 1) / product->block_rows;
    try {
        std::vector<float*> scratch;
        for (auto& buffer : context->of_threads) scratch.push_back(buffer.take(num_tiles > 1 ? product->scratch_floats : 0));
        for (int64_t block = 0; block < num_blocks; block++) {
            const int64_t first_row = block * num_tiles / num_blocks * kRowTile;
            const int64_t end_row = std::min(call->num_rows, (block + 1) * num_tiles / num_blocks * kRowTile);
            const DsProduct rows = rows_of(*call, first_row, end_row);
            const int64_t work = panel_bytes * (1 + rows.num_rows / kRowTile);
            const TaskSizes sizes = {kAlone, std::max(kTask, group * work)};
            context->pool.run_ranges(num_panels, work, sizes, [&](int64_t first, int64_t end, int thread) {
                product->multiply(rows, first, end, scratch[thread]);
            });
        }
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
}
