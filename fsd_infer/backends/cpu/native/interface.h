// What the C interface takes. kernels.py mirrors these structs.
#pragma once

#include "numbers.h"

// A linear layer [columns, depth].
struct fsd_linear {
  const void* panels;    // the packed weight
  int64_t kind;          // ggml's number of its block type; 0: no blocks
  int64_t side;          // columns of a panel: 32 or 64; for blocks BLOCK_SIDE (products.h)
  const float* scales;   // [columns], the scales of fp8 numbers; null: bf16
  const uint16_t* bias;  // [columns] or null
  int64_t columns, depth;
};

// A batch of draft trees of `count` nodes each, [trees, count]; proposers: null where all are 0.
struct fsd_tree {
  const int64_t *tokens, *parents;
  const float* scores;
  const int64_t* proposers;
  int64_t count;
};

// A Llama-style decoder layer. Norms are vectors; those marked * may be null.
struct fsd_layer {
  fsd_linear query, key, value, output, gate, up, down;
  const bf16 *input_norm /* * */, *query_norm /* * */, *key_norm /* * */, *mlp_norm;
};

// Consecutive layers of equal sizes.
struct fsd_stack {
  const fsd_layer* layers;
  int64_t number, hidden, inner, query_heads, key_heads, width;
  float epsilon, scale;
};

// One forward. Strides describe keys and values [layers, batch, key heads, slots, width].
struct fsd_forward {
  int64_t batch, count;           // rows of x: batch · count
  const bf16* x;                  // [rows, hidden]
  const bf16* attended;           // [rows, depth of the first query layer]: input of the first attention; null: norm(x)
  const int64_t* positions;       // [rows]
  const int64_t* slots;           // [rows], the slots of the new keys and values
  const bf16 *cosine, *sine;      // [angles, width] by position
  int64_t angles;
  const uint8_t* const* visible;  // per layer: [batch, count, used]
  int64_t used;                   // slots to attend to
  bf16 *keys, *values;
  int64_t capacity, layer_stride, batch_stride, head_stride, slot_stride;
  bf16* const* outputs;           // per layer: [rows, hidden] for its output, or null
  const bf16* final_norm;         // null: none
  bf16* out;                      // [rows, hidden], the last layer's output after final_norm
  bf16* scratch;                  // fsd_scratch(...) bytes
  int64_t many;                   // see fsd_linear_forward
  int64_t threads;
};

// What a draft head does around its layers. Of the layouts in heads/head.py, those with `fc` over [embedding ; feature].
struct fsd_head {
  fsd_linear embed, fc, lm_head;  // embed: a table, read by rows; all zeros: steps come with embeddings
  fsd_linear fusion;              // of normed inner layers of the target, if `fused`
  const bf16* fusion_norms;       // [fused, hidden]
  const bf16* feature_scale;      // [hidden] or null: features are divided by it
  int64_t fused;
  float fusion_epsilon;
};

// One step of a draft head: a forward whose x is made from ids and features, and logits of its output.
struct fsd_step {
  const int64_t* ids;    // [rows], or null
  const bf16* embeds;    // [rows, depth of fc - hidden], if ids is null
  const bf16* features;  // [rows, hidden], or with the inner layers [rows, (1 + fused) · hidden]
  bf16* joined;          // [rows, depth of fc]: memory
  bf16* inner;           // [rows, fused · hidden]: memory; null: features are without inner layers
  const float* more;     // [extra, hidden], further rows of the LM head
  int64_t extra;
  bf16* logits;          // [rows, columns of the LM head + extra]
};

// Constants of mixed_children in fsd_core/sampling.py. likely, drawn: learned ratios; min_accept, as a logarithm.
struct fsd_mixing {
  float likely, drawn, unsure, sure, min_rest, min_accept;
};

// Draft trees of a round above temperature 0, as DraftTree in fsd_infer/trees/tree.py. bf16 (narrow) or fp32 logits of p
// [batch, count, columns] and of the distributions q of draws [batch, drafts, drafted]; q is null if nothing was drawn.
struct fsd_round {
  int64_t batch, count, columns, drafts, drafted;
  const void *p, *q, *logits, *q_logits;  // the latter before processors; logits: null if p is of them
  int64_t narrow_p, narrow_q, narrow_logits, narrow_q_logits;
  const int64_t *tokens, *parents, *q_index;  // [batch, count]; parents come before their children
  const float* scores;                        // [batch, count]
  const uint8_t* drawn;                       // [batch, count]; null: all drafts, if there is a q
  const int64_t* draft_ids;                   // [drafted] the tokens of q; null: all
  const float* uniforms;                      // [batch, count, 3], with `stride` from tree to tree
  int64_t stride;
};

// What is emitted, [batch, width] each: see Verdict in fsd_infer/rules/verification.py.
struct fsd_walked {
  int64_t width;
  int64_t *path, *tokens, *sources, *first_choices;
  float* gaps;
  int64_t* accepted;  // [batch]
};
