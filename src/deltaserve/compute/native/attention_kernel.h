// What kernels compute, in plain structures: kernel files hold no inline functions of C++ headers (compile_library.py).
//
// Keys of a query are cut at absolute multiples of `split_tokens`; each split gives a partial result (largest score, sum,
// weighted values) of each row, and those are merged from first to last. A row's arithmetic follows from its own query
// alone, of a short one from its own position: whoever else reads the split with it, and on whichever thread, its bits are
// the same.
#pragma once
#include <stdint.h>

#include "native.h"

namespace deltaserve {

constexpr int kBlockKeys = 64;  // scores of a row at once; blocks lie at absolute multiples in a split
constexpr int kTileRows = 6;    // rows that meet a key while it is in registers
constexpr int kGroupTiles = 6;  // tiles that meet a block's keys before they meet its values: either fits the first cache

// One token of a query over some keys; it stands for `group_size` rows of each KV head.
struct TokenRows {
    int64_t first_key, end_key;  // that its position sees
    int64_t first_part;          // number of its partial result of the segment's first split, where they are kept
    int32_t token;
};

// Keys that some tokens read together.
struct Segment {
    int64_t start, end;      // `start` is a multiple of split_tokens
    int64_t pages;           // where in PlanView::pages the page of position 0 stands
    int32_t rows, end_rows;  // in PlanView::rows
    bool keeps_parts;        // else its tokens read nothing else, and are complete at its end
    bool is_long;            // of one query of many positions, whose keys no other reads with it
};

struct Task {
    int64_t start, end;  // keys
    int32_t segment;
    int32_t head;             // KV head
    int32_t first, num_rows;  // of the segment, counted over tokens and the heads of the group
};

// A token's partial results, from first to last.
struct Merge {
    int64_t first_part, num_parts;
    int32_t token;
};

struct PlanView {
    const DsWork* work;
    const int32_t* pages;
    const TokenRows* rows;
    const Segment* segments;
    int max_rows;  // of a task
};

struct Scratch {
    float* rows;         // of a thread: see attention_kernel.cpp
    float* parts;        // [part][head][padded value dim]
    float* part_scales;  // [part][head][2]
};

// Channels in scratch memory: a multiple of every vector.
constexpr int padded(int dim) { return (dim + 15) / 16 * 16; }

// Floats for the scores of a group of tiles, or for keys on their way into packed ones.
constexpr int64_t score_floats(int head_dim) {
    constexpr int64_t kScores = kGroupTiles * kTileRows * kBlockKeys;
    return kScores > 16 * padded(head_dim) ? kScores : 16 * padded(head_dim);
}

// Floats of Scratch::rows: queries, values of a split and of all so far, two scales of each, two numbers of keys of 64 bits;
// scores; keys and values.
constexpr int64_t scratch_floats(int64_t max_rows, int head_dim, int value_dim) {
    return max_rows * (padded(head_dim) + 2 * padded(value_dim) + 8) + score_floats(head_dim) +
           kBlockKeys * (padded(head_dim) + padded(value_dim)) + 16;
}

// One for each instruction set.
struct AttentionKernel {
    void (*run_task)(const PlanView& plan, const DsAttend& call, const Task& task, const Scratch& scratch);
    void (*merge)(const PlanView& plan, const DsAttend& call, const Merge& merge, const Scratch& scratch);
};

extern const AttentionKernel attention_generic, attention_avx2, attention_avx512, attention_avx512_bf16,
    attention_amx_bf16;

}  // namespace deltaserve
