// The C ABI: raw pointers, int64 strides, no exceptions. Every function here may be called without Python's lock.
#pragma once
#include <stdint.h>

#define DS_API __attribute__((visibility("default")))

extern "C" {

// Digest of the sources this library was made of.
DS_API const char* ds_sources();

// Instruction sets are numbered from the most general; higher is faster. Null for one that this machine cannot run.
DS_API int ds_num_isas();
DS_API const char* ds_isa_name(int isa);

enum DsElement { DS_FLOAT32 = 0, DS_BFLOAT16 = 1, DS_FLOAT16 = 2, DS_FLOAT8 = 3 };

// Threads and scratch memory, for one caller at a time. Null when there is no memory.
struct DsContext;
DS_API DsContext* ds_context_new(int num_threads);
DS_API void ds_context_free(DsContext* context);
// Of those it was made with, so many compute from now on; at least one.
DS_API void ds_context_use_threads(DsContext* context, int num_threads);
// Cores that processes divide (shared_cores.h): `places` is memory that all of them have mapped, 64 zero bytes for each at
// first, on a line of the cache; it must outlive the context. Threads beyond `own` compute where nobody else does.
// False: no such place, or no memory. Before any step.
DS_API bool ds_context_share_cores(DsContext* context, void* places, int place, int num_places, int num_cores, int own);
// Around each step; `for_ns`: how long after it the next one is expected.
DS_API void ds_context_begin(DsContext* context);
DS_API void ds_context_end(DsContext* context, int64_t for_ns);
// For work that others' threads do: how many may compute, until that number is given back.
DS_API int ds_context_borrow(DsContext* context);
DS_API void ds_context_give_back(DsContext* context, int num_threads);
DS_API int64_t ds_context_bytes(const DsContext* context);
// Gives scratch memory back.
DS_API void ds_context_trim(DsContext* context);

// What one step computes over one page group; see compute/attention/attention.py for the words. All is read when the plan is made.
struct DsWork {
    const int32_t* queries;  // [num_queries][3]: line, q_start, q_len
    int32_t num_queries;
    const int32_t* runs;  // [num_runs][3]: start, end, number of members
    int32_t num_runs;
    const int32_t* members;    // of all runs, one after the other: indexes of queries that may read them together
    const int32_t* table;      // [line][page index]: page
    int64_t table_stride;      // of a line, in pages
    int32_t split_tokens;
    int32_t page_size;
    int32_t window_len;  // INT32_MAX: a token sees all before it
    int32_t long_len;    // of queries that may round otherwise than shorter ones do, and share nothing; INT32_MAX: none
    int32_t num_kv_heads;
    int32_t group_size;  // query heads of a KV head
    int32_t head_dim;
    int32_t value_dim;
};

struct DsPlan;
DS_API DsPlan* ds_plan_new(const DsWork* work, int num_threads);
DS_API void ds_plan_free(DsPlan* plan);

// Attention of one layer.
struct DsAttend {
    const void* q;  // [token][head][head_dim]
    int64_t q_token_stride, q_head_stride;  // in elements
    void* out;                              // [token][head][value_dim], contiguous, of q's type
    int32_t q_type;
    int32_t kv_type;
    const uint8_t* keys;  // of page 0, head 0; strides in bytes
    const uint8_t* values;
    int64_t page_stride, head_stride, token_stride;
    const float* sinks;  // [head], or null
    float scale;
};

// False when there is no memory for it, or this machine cannot run `isa`.
DS_API bool ds_attend(DsContext* context, const DsPlan* plan, int isa, const DsAttend* call);

// Operators of a step. A row's result depends on that row alone. Types are float32 and bfloat16, that of weights float32 or
// the rows' own. Arrays are contiguous where no stride is given; strides are in elements. False when this machine cannot
// run `isa`, or the types are others.

// sums = x + added, where `after` is given x + norm of added; normed = norm of sums, or of x where nothing is added.
struct DsAddNorm {
    int32_t type, weight_type;
    int64_t num_rows, dim;
    const void* x;
    int64_t x_stride;
    const void* added;   // or null
    const void* after;   // [dim] weight of the norm of what is added, or null
    const void* weight;  // [dim]
    void* sums;          // [row][dim]; null where nothing is added
    void* normed;
    float eps;
};
DS_API bool ds_add_norm(DsContext* context, int isa, const DsAddNorm* call);

// Heads normalised each alone, then turned: the first `turning_dim` channels, i with i + turning_dim / 2.
struct DsTurn {
    int32_t type, weight_type;
    int64_t num_tokens, num_heads, head_dim, turning_dim;
    const void* x;  // [token][head][head_dim]
    int64_t token_stride, head_stride;
    const void* weight;      // [head][head_dim], or null: no norm
    const void *cos, *sin;   // [token][turning_dim], sin with its sign
    void* out;               // [token][head][head_dim]
    float eps;
};
DS_API bool ds_turn(DsContext* context, int isa, const DsTurn* call);

enum DsActivation { DS_SILU = 0, DS_GELU_TANH = 1 };

struct DsGate {
    int32_t type, activation;
    int64_t num_rows, dim;
    const void* gate_up;  // [row][2 dim]
    void* out;            // [row][dim]: activation(gate) * up
};
DS_API bool ds_gate(DsContext* context, int isa, const DsGate* call);

// Of each row of float32 the first of its largest values, and whether all are finite; a row that is not has any index.
struct DsPeaks {
    int64_t num_rows, dim;  // dim: 1 to 2^31 - 17
    const float* x;
    int64_t x_stride;
    int64_t* indexes;  // [row]
    uint8_t* finite;   // [row]: 1 or 0
};
DS_API bool ds_peaks(DsContext* context, int isa, const DsPeaks* call);

// Copies what heads are to keep to where it is kept: row `slots[token][head]` of `plane`, an array of `num_rows` rows.
// False, with nothing copied, when a slot is none of them.
struct DsKeep {
    int64_t num_tokens, num_heads, row_bytes, num_rows;
    const uint8_t* values;  // [token][head] rows; strides in bytes
    int64_t token_stride, head_stride;
    const int64_t* slots;
    uint8_t* plane;
};
DS_API bool ds_keep(const DsKeep* call);

// Any number of rows of x times a matrix that is packed in panels of 64 columns of the product: float32 [panel][depth][64],
// bfloat16 [panel][depth / 2][64][2] (only an even depth). A row's result depends on that row alone.
struct DsProduct {
    int32_t type;  // of everything
    int64_t num_rows, num_columns, depth;
    const void* x;  // [row][depth]
    int64_t x_stride;
    const void* panels;
    int64_t panel_depth;  // with what fills up
    const void* bias;     // [column], or null
    void* out;            // [row][column]
};
// Up to how many rows oneDNN is not faster (measured); 0: this machine cannot run `isa`, or that does not compute the type.
DS_API int64_t ds_product_rows(int isa, int type);
DS_API bool ds_product(DsContext* context, int isa, const DsProduct* call);

// A matrix whose weights are codes with a scale for each run of them: scale * (code - zero) + offset. It is packed in panels
// of 32 columns of the product; compute/weights/block_matrix.py packs them, blocks_kernel.h says how they lie.
struct DsBlocks {
    int32_t bits;     // of a code: 4 or 8
    int32_t run_len;  // 16 or 32 weights of a row
    int32_t scale_type;
    int32_t zero;
    int32_t has_offsets;
    int64_t num_columns, depth;  // depth: a multiple of 32
    const void* panels;
};

// Any number of rows of x times such a matrix. A row's result depends on that row alone.
struct DsBlockProduct {
    int32_t type;    // of x, bias and results
    int32_t rounds;  // each 32 values of x to int8 with a scale of their own; else float32 throughout
    int64_t num_rows;
    const void* x;  // [row][depth]
    int64_t x_stride;
    DsBlocks blocks;
    const void* bias;  // [column], or null
    void* out;         // [row][column]
    int64_t out_stride;
};
DS_API bool ds_block_product(DsContext* context, int isa, const DsBlockProduct* call);

// The gated delta rule (compute/layers/delta_rule.py), token by token. All of it is float32. The tokens of a span are those of one
// request, one after the other; no two spans have a state or a token in common. A token's result depends on its request's
// tokens up to it alone. False, with nothing computed, for a span outside of the arrays.
struct DsDeltaRule {
    int64_t num_tokens, num_states, num_key_heads, num_heads, key_dim, value_dim;  // num_heads: a multiple of num_key_heads
    const float *q, *k;  // [token][key head][key_dim]
    const float* v;      // [token][head][value_dim]
    const float *decay, *beta;  // [token][head]: what a state is multiplied by, and how much of what is missing it takes in
    float* out;                 // [token][head][value_dim]
    float* states;              // [state][head][key_dim][value_dim], which change
    const int64_t* spans;       // [span][3]: state, first token, number of tokens
    int64_t num_spans;
};
DS_API bool ds_delta_rule(DsContext* context, int isa, const DsDeltaRule* call);

}  // extern "C"
