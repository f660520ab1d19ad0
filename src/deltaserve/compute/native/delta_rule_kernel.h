// The gated delta rule, in plain structures: see attention_kernel.h for why.
#pragma once
#include <stdint.h>

#include "native.h"

namespace deltaserve {

// One for each instruction set; computes pairs first <= pair < end of a span and a head: span * num_heads + head.
struct DeltaRuleKernel {
    void (*pass_heads)(const DsDeltaRule& call, int64_t first, int64_t end);
};

extern const DeltaRuleKernel delta_rule_generic, delta_rule_avx2, delta_rule_avx512;

}  // namespace deltaserve
