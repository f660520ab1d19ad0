// Runs products with matrices of codes on the threads of a context.
#include <algorithm>
#include <new>

#include "context.h"
#include "kernels.h"

using namespace deltaserve;

namespace {

constexpr TaskSizes kPanelBytes = {1 << 20, 128 << 10};  // for a few rows
constexpr TaskSizes kValues = {32768, 32768};            // of x

bool is_known(const DsBlockProduct& call) {
    const DsBlocks& b = call.blocks;
    const bool is_packed = (b.bits == 4 || b.bits == 8) && (b.run_len == 16 || b.run_len == 32) &&
                           (b.scale_type == DS_FLOAT16 || b.scale_type == DS_FLOAT32);
    return is_packed && b.depth % kRoundedLen == 0 && (call.type == DS_FLOAT32 || call.type == DS_BFLOAT16);
}

// What `prepare` fills, in the context's memory. Throws std::bad_alloc.
PreparedRows take_rows(DsContext* context, const DsBlockProduct& call) {
    const DsBlocks& b = call.blocks;
    const int64_t num_values = call.num_rows * b.depth, num_runs = num_values / b.run_len;
    const int64_t values = call.rounds ? 0 : num_values, sums = b.has_offsets ? num_runs : 0;
    const int64_t codes = call.rounds ? num_values / 4 : 0, scales = call.rounds ? num_values / kRoundedLen : 0;
    const int64_t starts = call.rounds ? num_runs : 0;
    float* at = context->rows.take(std::max<int64_t>(1, values + sums + codes + scales + starts));
    PreparedRows rows = {};
    rows.values = values ? at : nullptr;
    rows.sums = sums ? at + values : nullptr;
    rows.codes = codes ? (int32_t*)(at + values + sums) : nullptr;
    rows.scales = codes ? at + values + sums + codes : nullptr;
    rows.starts = codes ? (int32_t*)(at + values + sums + codes + scales) : nullptr;
    return rows;
}

}  // namespace

bool ds_block_product(DsContext* context, int isa, const DsBlockProduct* call) {
    const Kernels* kernels = kernels_of(isa);
    if (kernels == nullptr || !is_known(*call)) return false;
    const DsBlocks& b = call->blocks;
    try {
        const PreparedRows rows = take_rows(context, *call);
        std::vector<float*> scratch;
        for (auto& buffer : context->of_threads) scratch.push_back(buffer.take(kBlockScratch));
        const int64_t num_tiles = tile_count(call->num_rows);
        context->pool.run_ranges(num_tiles, kBlockRows * b.depth, kValues, [&](int64_t first, int64_t end, int) {
            kernels->blocks->prepare(*call, rows, first, end);
        });
        const int64_t num_panels = (b.num_columns + kBlockColumns - 1) / kBlockColumns;
        const int64_t work = panel_bytes(b) * (1 + call->num_rows / 8);
        context->pool.run_ranges(num_panels, work, kPanelBytes, [&](int64_t first, int64_t end, int thread) {
            kernels->blocks->multiply(*call, rows, first, end, scratch[thread]);
        });
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
}
