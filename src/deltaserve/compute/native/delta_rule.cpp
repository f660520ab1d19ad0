// Runs recurrences on the threads of a context, with the kernels of one instruction set.
#include "context.h"
#include "kernels.h"

using namespace deltaserve;

namespace {

constexpr TaskSizes kElements = {1 << 18, 1 << 16};

}  // namespace

bool ds_delta_rule(DsContext* context, int isa, const DsDeltaRule* call) {
    const Kernels* kernels = kernels_of(isa);
    if (kernels == nullptr) return false;
    int64_t num_tokens = 0;
    for (int64_t i = 0; i < call->num_spans; i++) {
        const int64_t *span = call->spans + 3 * i, end = span[1] + span[2];
        if (span[0] < 0 || span[0] >= call->num_states || span[1] < 0 || span[2] < 0 || end > call->num_tokens) return false;
        num_tokens += span[2];
    }
    const int64_t num_pairs = call->num_spans * call->num_heads;
    const int64_t work = num_tokens * call->key_dim * call->value_dim / (num_pairs ? call->num_spans : 1);
    context->pool.run_ranges(num_pairs, work, kElements,
                             [&](int64_t first, int64_t end, int) { kernels->delta_rule->pass_heads(*call, first, end); });
    return true;
}
