// Runs a plan on the threads of a context, with the kernels of one instruction set.
#include <new>

#include "attention_plan.h"
#include "context.h"
#include "kernels.h"

using namespace deltaserve;

namespace {

constexpr int64_t kShortProducts = 1 << 18;  // computed sooner by one thread than another wakes

}  // namespace

bool ds_attend(DsContext* context, const DsPlan* plan, int isa, const DsAttend* call) {
    const Kernels* kernels = kernels_of(isa);
    if (kernels == nullptr) return false;
    try {
        const int num_heads = plan->work.num_kv_heads * plan->work.group_size;
        float* parts = context->parts.take(plan->num_parts * num_heads * padded(plan->work.value_dim));
        float* part_scales = context->part_scales.take(plan->num_parts * num_heads * 2);
        const int64_t num_floats = scratch_floats(plan->max_rows, plan->work.head_dim, plan->work.value_dim);
        std::vector<Scratch> scratch;
        for (auto& buffer : context->of_threads)
            scratch.push_back({buffer.take(num_floats), parts, part_scales});
        const PlanView view = plan->view();
        const auto run = [&](int64_t count, int64_t num_products, const auto& task) {
            if (num_products > kShortProducts) return context->pool.run(count, task);
            for (int64_t i = 0; i < count; i++) task(i, 0);
        };
        run((int64_t)plan->tasks.size(), plan->num_products, [&](int64_t i, int thread) {
            kernels->attention->run_task(view, *call, plan->tasks[i], scratch[thread]);
        });
        run((int64_t)plan->merges.size(), plan->num_parts * num_heads * plan->work.value_dim, [&](int64_t i, int thread) {
            kernels->attention->merge(view, *call, plan->merges[i], scratch[thread]);
        });
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
}
