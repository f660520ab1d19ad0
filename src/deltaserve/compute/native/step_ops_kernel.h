// Rows of a step's operators, in plain structures: see attention_kernel.h for why.
#pragma once
#include <stdint.h>

#include "native.h"

namespace deltaserve {

// One for each instruction set; each function computes rows first <= row < end of a call.
struct StepOpsKernel {
    void (*add_norm)(const DsAddNorm& call, int64_t first, int64_t end);
    void (*turn)(const DsTurn& call, int64_t first, int64_t end);
    void (*gate)(const DsGate& call, int64_t first, int64_t end);
    void (*peaks)(const DsPeaks& call, int64_t first, int64_t end);
};

extern const StepOpsKernel step_ops_generic, step_ops_avx2, step_ops_avx512, step_ops_avx512_bf16;

}  // namespace deltaserve
