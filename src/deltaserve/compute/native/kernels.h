// One table of instruction sets: which kernels run on which. The library keeps it; kernel files only fill rows in.
#pragma once
#include "attention_kernel.h"
#include "blocks_kernel.h"
#include "delta_rule_kernel.h"
#include "product_kernel.h"
#include "step_ops_kernel.h"

namespace deltaserve {

struct Kernels {
    const char* name;
    bool (*runs_here)();
    const AttentionKernel* attention;
    const StepOpsKernel* step_ops;
    const ProductKernel* product;
    const BlocksKernel* blocks;
    const DeltaRuleKernel* delta_rule;
};

// Null for a number that is none, or that this machine cannot run.
const Kernels* kernels_of(int isa);

}  // namespace deltaserve
