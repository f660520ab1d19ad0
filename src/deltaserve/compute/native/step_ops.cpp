// Runs a step's operators on the threads of a context, with the kernels of one instruction set.
#include <string.h>

#include <algorithm>

#include "context.h"
#include "kernels.h"

using namespace deltaserve;

namespace {

constexpr TaskSizes kElements = {1 << 18, 1 << 16};

const StepOpsKernel* kernel_of(int isa) {
    const Kernels* kernels = kernels_of(isa);
    return kernels == nullptr ? nullptr : kernels->step_ops;
}

bool is_known(int32_t type) { return type == DS_FLOAT32 || type == DS_BFLOAT16; }

template <class Call>
void run_rows(DsContext* context, void (*rows)(const Call&, int64_t, int64_t), const Call& call, int64_t num_rows,
              int64_t row_elements) {
    context->pool.run_ranges(num_rows, row_elements, kElements,
                             [&](int64_t first, int64_t end, int) { rows(call, first, end); });
}

}  // namespace

bool ds_add_norm(DsContext* context, int isa, const DsAddNorm* call) {
    const StepOpsKernel* kernel = kernel_of(isa);
    const bool fits = call->weight_type == DS_FLOAT32 || call->weight_type == call->type;
    if (kernel == nullptr || !is_known(call->type) || !fits) return false;
    run_rows(context, kernel->add_norm, *call, call->num_rows, call->dim);
    return true;
}

bool ds_turn(DsContext* context, int isa, const DsTurn* call) {
    const StepOpsKernel* kernel = kernel_of(isa);
    const bool fits = call->weight_type == DS_FLOAT32 || call->weight_type == call->type;
    if (kernel == nullptr || !is_known(call->type) || !fits) return false;
    run_rows(context, kernel->turn, *call, call->num_tokens, call->num_heads * call->head_dim);
    return true;
}

bool ds_gate(DsContext* context, int isa, const DsGate* call) {
    const StepOpsKernel* kernel = kernel_of(isa);
    if (kernel == nullptr || !is_known(call->type)) return false;
    run_rows(context, kernel->gate, *call, call->num_rows, call->dim);
    return true;
}

bool ds_peaks(DsContext* context, int isa, const DsPeaks* call) {
    const StepOpsKernel* kernel = kernel_of(isa);
    if (kernel == nullptr || call->dim < 1 || call->dim > INT32_MAX - 16) return false;
    run_rows(context, kernel->peaks, *call, call->num_rows, call->dim);
    return true;
}

bool ds_keep(const DsKeep* call) {
    const int64_t num_slots = call->num_tokens * call->num_heads;
    if (std::any_of(call->slots, call->slots + num_slots, [&](int64_t slot) { return slot < 0 || slot >= call->num_rows; }))
        return false;
    for (int64_t token = 0; token < call->num_tokens; token++)
        for (int64_t head = 0; head < call->num_heads; head++)
            memcpy(call->plane + call->slots[token * call->num_heads + head] * call->row_bytes,
                   call->values + token * call->token_stride + head * call->head_stride, (size_t)call->row_bytes);
    return true;
}
