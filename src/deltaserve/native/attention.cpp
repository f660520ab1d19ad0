// Runs a plan on the threads of a context, with the kernels of one instruction set.
#include <new>

#include "attention_kernel.h"
#include "attention_plan.h"
#include "context.h"

using namespace deltaserve;

namespace {

const AttentionKernel* kernel_of(int isa) {
    if (ds_isa_name(isa) == nullptr) return nullptr;
#if defined(__x86_64__)
    static constexpr const AttentionKernel* kKernels[] = {&attention_generic, &attention_avx2, &attention_avx512,
                                                          &attention_avx512_bf16};
#else
    static constexpr const AttentionKernel* kKernels[] = {&attention_generic};
#endif
    return kKernels[isa];
}

}  // namespace

bool ds_attend(DsContext* context, const DsPlan* plan, int isa, const DsAttend* call) {
    const AttentionKernel* kernel = kernel_of(isa);
    if (kernel == nullptr) return false;
    try {
        const int num_heads = plan->work.num_kv_heads * plan->work.group_size;
        float* parts = context->parts.take(plan->num_parts * num_heads * padded(plan->work.value_dim));
        float* part_scales = context->part_scales.take(plan->num_parts * num_heads * 2);
        const int64_t num_floats = scratch_floats(plan->max_rows, plan->work.head_dim, plan->work.value_dim);
        std::vector<Scratch> scratch;
        for (auto& buffer : context->of_threads)
            scratch.push_back({buffer.take(num_floats), parts, part_scales});
        const PlanView view = plan->view();
        context->pool.run((int64_t)plan->tasks.size(), [&](int64_t i, int thread) {
            kernel->run_task(view, *call, plan->tasks[i], scratch[thread]);
        });
        context->pool.run((int64_t)plan->merges.size(), [&](int64_t i, int thread) {
            kernel->merge(view, *call, plan->merges[i], scratch[thread]);
        });
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
}
