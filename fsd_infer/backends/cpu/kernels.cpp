// Kernels for decoding in bf16 on CPUs with AVX2 or AVX512-BF16, for the few tokens of a draft or of a verifying forward.
//
// This file is the C interface for ctypes. kernels.py compiles it on the user's machine. It is one translation unit: the
// headers in native/ keep their contents in an anonymous namespace, but for trees.h's functions, which belong to the
// interface. bf16 values are passed as uint16_t.
//
// A packed weight W [N, K] has oneDNN's layout, in panels of output columns: [N / side][K / 2][side][2]. oneDNN chooses
// the side, 32 with AMX and else 64; where oneDNN has no bf16, it is 32. A weight may hold fp8 numbers in the same places,
// with a scale per column: half the bytes, and each number is a bf16. Or it holds ggml's blocks, in records of 16 columns
// (blocks.h).
// Compiled for AMX, products run on its tiles, otherwise on vectors; those of blocks with up to four rows always do.
// Everything is written in AVX-512's operations. Compiled without it, avx2.h defines them.
// Arithmetic is in fp32, and with blocks in whole numbers (block_products.h). Values are rounded when they are stored:
// after norms, products, residuals and gates.

#include "native/layers.h"
#include "native/statistics.h"
#include "native/trees.h"
#include "native/walk.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <limits>
#include <type_traits>

extern "C" {

// Ask the system for the use of AMX tiles. Returns 0 if granted. Call it once per process, before anything else.
int fsd_prepare() {
#ifdef __AMX_BF16__
  constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return (int)syscall(SYS_arch_prctl, REQUEST, TILES);
#else
  return 0;
#endif
}

// The name of this set of kernels, as in sets.py.
const char* fsd_name() {
#if defined(__AMX_BF16__)
  return "amx";
#elif defined(__AVX512F__)
  return "avx512";
#else
  return "avx2";
#endif
}

// y [count, depth], in bf16 (narrow) or fp32 = rows `ids` [count] of a packed weight that is not fp8. Returns the number of
// ids out of range; then y is not written.
int64_t fsd_rows(const fsd_linear* layer, const int64_t* ids, int64_t count, int narrow_y, void* y, int threads) {
  const int64_t wrong = outside(ids, count, layer->columns), depth = layer->depth;
  if (wrong) return wrong;
#pragma omp parallel num_threads(threads)
  {
    const Share share(count);
    for (int64_t i = share.begin; i < share.end; ++i) {
      if (narrow_y) read_row(*layer, ids[i], (bf16*)y + i * depth);
      else read_row(*layer, ids[i], (float*)y + i * depth);
    }
  }
  return 0;
}

// Bytes of a weight [columns, depth] in blocks of a type; 0 if the type or the sizes do not fit.
int64_t fsd_block_bytes(int64_t kind, int64_t columns, int64_t depth) {
  int64_t bytes = 0;
  with_form(kind, [&](auto form) {
    using F = decltype(form);
    if (columns % BLOCK_SIDE == 0 && depth % F::SPAN == 0) bytes = columns / LANES * (depth / F::SPAN) * F::RECORD;
  });
  return bytes;
}

// Write rows of a file to the zeroed panels of a weight [columns, depth]. order [columns]: the row of each column, null
// for all in order. Returns the number of scales that are not finite.
int64_t fsd_block_pack(int64_t kind, const uint8_t* rows, const int64_t* order, int64_t columns, int64_t depth,
                       uint8_t* panels, int threads) {
  int64_t wrong = 0;
  with_form(kind, [&](auto form) {
    using F = decltype(form);
    const int64_t records = depth / F::SPAN;
    Record record;
    const int64_t length = read_record(kind, rows, record) * records;
    const auto none = [](uint16_t bits) { return (bits & 0x7C00) == 0x7C00; };
#pragma omp parallel num_threads(threads) reduction(+ : wrong)
    {
      const Share share(columns / LANES);
      for (int64_t column = share.begin * LANES; column < share.end * LANES; ++column) {
        const uint8_t* from = rows + (order ? order[column] : column) * length;
        uint8_t* to = panels + column / LANES * records * F::RECORD;
        Record own;
        for (int64_t r = 0; r < records; ++r, to += F::RECORD) {
          from += read_record(kind, from, own);
          wrong += none(own.d) + none(own.m);
          put<F>(own, (int)(column % LANES), to);
        }
      }
    }
  });
  return wrong;
}

// The columns that a weight in blocks counts as a panel.
int64_t fsd_block_side() { return BLOCK_SIDE; }

// y [rows, columns] of x [rows, depth]. many: widen weights in blocks to bf16 first where that is faster,
// as prompts do.
void fsd_linear_forward(const bf16* x, const fsd_linear* layer, bf16* y, int64_t rows, int many, int threads) {
  // rows that a thread may widen
  constexpr int64_t TOGETHER_AT_MOST = std::is_same_v<Plain, float> ? 256 : std::numeric_limits<int>::max();
#pragma omp parallel num_threads(threads)
  {
    Multiplier multiply(many);
    for (int64_t first = 0; first < rows; first += TOGETHER_AT_MOST) {
      bf16* const to = y + first * layer->columns;
      product(multiply, x + first * layer->depth, (int)std::min(rows - first, TOGETHER_AT_MOST), {layer},
              [&](int row, int64_t column, auto sum) { store(to + row * layer->columns + column, sum); });
    }
  }
}

// For `rows` rows of logits x [·, columns], in bf16 (narrow) or fp32: the largest number (NaN if the row has one), its
// first place and, unless `totals` is null, ln Σ e^x. chosen [rows]: the rows that count, null for all; others get 0.
void fsd_row_statistics(int narrow_x, const void* x, const uint8_t* chosen, int64_t rows, int64_t columns,
                        float* highest, int64_t* where, float* totals, int threads) {
  const auto of = [&](auto numbers) {
    // threads take turns, as rows that count may come first
    for (int64_t row = omp_get_thread_num(); row < rows; row += omp_get_num_threads()) {
      const auto* const from = numbers + row * columns;
      const Maximum found = chosen && !chosen[row] ? Maximum{0.f, 0} : maximum(from, columns);
      highest[row] = found.value;
      where[row] = found.place;
      if (totals && chosen && !chosen[row]) totals[row] = 0.f;
      else if (totals) totals[row] = std::isfinite(found.value) ? log_sum_exp(from, columns, found.value) : found.value;
    }
  };
#pragma omp parallel num_threads(threads)
  {
    if (narrow_x) of((const bf16*)x);
    else of((const float*)x);
  }
}

// The entropy of each row's softmax; if its largest number is infinite or NaN, that number. pick [rows]: the numbers of
// the rows, null for all in order.
void fsd_row_entropies(int narrow_x, const void* x, const int64_t* pick, int64_t rows, int64_t columns,
                       float* entropies, int threads) {
  const auto of = [&](auto numbers) {
    const Rows<std::remove_const_t<std::remove_pointer_t<decltype(numbers)>>> from{numbers, columns, pick};
    const Share share(rows);
    for (int64_t row = share.begin; row < share.end; ++row) {
      const float highest = maximum(from[row], columns).value;
      entropies[row] = std::isfinite(highest) ? entropy(from[row], columns, highest) : highest;
    }
  };
#pragma omp parallel num_threads(threads)
  {
    if (narrow_x) of((const bf16*)x);
    else of((const float*)x);
  }
}

// out [rows] = divergence `kind` between rows of logits p [·, columns] and q [·, drafted], in bf16 (narrow) or fp32.
// p_rows, q_rows [rows]: the numbers of the rows, null for all in order; -1 of q for none, where the result is infinite,
// or 0 of a residual. ids [drafted]: the tokens of q, null for all. Divergences that are infinite where q is 0 take no
// ids. weights [rows] of the residual's p, else null.
void fsd_divergence(int kind, int64_t rows, int narrow_p, const void* p, const int64_t* p_rows, int64_t columns,
                    int narrow_q, const void* q, const int64_t* q_rows, int64_t drafted, const int64_t* ids,
                    const float* weights, float* out, int threads) {
#pragma omp parallel num_threads(threads)
  {
    const auto from = [&](auto p_numbers) {
      const Rows<std::remove_const_t<std::remove_pointer_t<decltype(p_numbers)>>> of_p{p_numbers, columns, p_rows};
      if (narrow_q) divergences(kind, of_p, Rows<bf16>{(const bf16*)q, drafted, q_rows}, rows, ids, weights, out);
      else divergences(kind, of_p, Rows<float>{(const float*)q, drafted, q_rows}, rows, ids, weights, out);
    };
    if (narrow_p) from((const bf16*)p);
    else from((const float*)p);
  }
}

// log_q, where [rows, most]: log-probabilities and places of the `most` likeliest tokens of logits x [rows, columns], in
// bf16 (narrow) or fp32. most <= columns.
void fsd_likeliest(int narrow_x, const void* x, int64_t rows, int64_t columns, int64_t most, float* log_q,
                   int64_t* where, int threads) {
#pragma omp parallel num_threads(threads)
  {
    const Share share(rows);
    for (int64_t row = share.begin; row < share.end; ++row) {
      float* const values = log_q + row * most;
      int64_t* const places = where + row * most;
      if (narrow_x) likeliest((const bf16*)x + row * columns, columns, most, values, places);
      else likeliest((const float*)x + row * columns, columns, most, values, places);
    }
  }
}

// where [rows]: an index of the softmax of each row of logits x [rows, columns], in bf16 (narrow) or fp32, for a uniform
// number; 0 in rows that are not chosen.
void fsd_sample(int narrow_x, const void* x, const uint8_t* chosen, int64_t rows, int64_t columns, const float* uniforms,
                int64_t* where, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t row = 0; row < rows; ++row) {
    if (!chosen[row]) where[row] = 0;
    else where[row] = narrow_x ? sampled((const bf16*)x + row * columns, columns, uniforms[row])
                               : sampled((const float*)x + row * columns, columns, uniforms[row]);
  }
}

// found [batch]: see draw_rest in fsd_core/sampling.py. p [batch, count, columns] and q [batch, drafts, drafted], in bf16
// (narrow) or fp32, have a row for each of nodes and q_index [batch]; without q, q is null or the index -1.
// refused [batch, most].
void fsd_draw_rest(int narrow_p, const void* p, const int64_t* nodes, int64_t count, int64_t columns, int narrow_q,
                   const void* q, const int64_t* q_index, int64_t drafts, int64_t drafted, const int64_t* ids,
                   const float* weights, const float* uniforms, const int64_t* refused, int64_t most, int64_t batch,
                   int64_t* found, int threads) {
  const auto draw = [&](auto of_p, auto of_q, int64_t row) {
    if (nodes[row] < 0 || nodes[row] >= count) return columns;
    of_q = of_q && q_index[row] >= 0 && q_index[row] < drafts ? of_q + (row * drafts + q_index[row]) * drafted : nullptr;
    return drawn_rest(of_p + (row * count + nodes[row]) * columns, columns, weights[row], of_q, drafted, ids,
                      refused + row * most, most, uniforms[row]);
  };
#pragma omp parallel num_threads(threads)
  {
    const Share share(batch);
    for (int64_t row = share.begin; row < share.end; ++row) {
      if (narrow_p && narrow_q) found[row] = draw((const bf16*)p, (const bf16*)q, row);
      else if (narrow_p) found[row] = draw((const bf16*)p, (const float*)q, row);
      else if (narrow_q) found[row] = draw((const float*)p, (const bf16*)q, row);
      else found[row] = draw((const float*)p, (const float*)q, row);
    }
  }
}

// See mixed_children in fsd_core/sampling.py: scores [batch, count, drafted] in bf16 (narrow) or fp32, accept [batch,
// count], ancestors [batch, count, nodes], reserved [batch, nodes] and free_nodes [batch], which change. Columns of log_q,
// entries, drawn and fixed are the contexts' children, `width` of each.
void fsd_mixed_children(int narrow, const void* scores, int64_t batch, int64_t count, int64_t drafted, int64_t width,
                        const float* accept, const uint8_t* ancestors, int64_t nodes, const fsd_mixing* how, float* log_q,
                        int64_t* entries, uint8_t* drawn, int64_t* fixed, float* outside, uint8_t* reserved,
                        int64_t* free_nodes, int threads) {
  const int64_t contexts = batch * count;
#pragma omp parallel num_threads(threads)
  {
    const Share share(contexts);
    for (int64_t each = share.begin; each < share.end; ++each) {
      const auto read = [&](auto x) {
        likeliest(x, drafted, width, log_q + each * width, entries + each * width);
        for (int64_t at = 0; at < drafted; ++at) outside[each * drafted + at] = number(x[at]);
      };
      if (narrow) read((const bf16*)scores + each * drafted);
      else read((const float*)scores + each * drafted);
    }
  }
  std::vector<uint8_t> before(nodes);
  std::vector<int64_t> sum(batch), spent(batch);
  for (int64_t each = 0; each < contexts; ++each, ++accept, log_q += width, entries += width, drawn += width,
               fixed += width, ancestors += nodes, outside += drafted) {
    const int64_t row = each / count;
    if (each % count == 0) std::copy(reserved + row * nodes, reserved + (row + 1) * nodes, before.begin());
    const float ratio = std::min(how->drawn * (how->unsure + (how->sure - how->unsure) * std::exp(log_q[0])), how->sure);
    const float gain = std::log(std::max(how->likely - ratio, 0.f));
    float rest = 1;
    for (int64_t i = 0; i < width; ++i) {
      const bool is_fixed = i + 1 < width && *accept + log_q[i] + gain >= how->min_accept;
      drawn[i] = 0, fixed[i] = is_fixed ? entries[i] : -1;
      if (is_fixed) rest -= std::exp(log_q[i]), outside[entries[i]] = -INFINITY;
    }
    const float of_drawn = std::log(ratio * std::max(rest, 0.f));
    int64_t cost = 1;
    for (int64_t node = 0; node < nodes; ++node) cost += ancestors[node] && !before[node];
    const bool wants = *accept + of_drawn >= how->min_accept && rest > how->min_rest;
    if (!wants || (sum[row] += cost) > free_nodes[row]) continue;
    spent[row] += cost;
    for (int64_t node = 0; node < nodes; ++node) reserved[row * nodes + node] |= ancestors[node];
    for (int64_t i = 0; i < width; ++i)
      if (fixed[i] < 0) log_q[i] = -INFINITY;
    drawn[width - 1] = 1, log_q[width - 1] = of_drawn;
  }
  for (int64_t row = 0; row < batch; ++row) free_nodes[row] -= spent[row];
}

// Walk a round: see exact_walk in fsd_infer/rules/walk.py. Returns how many numbers are out of range or, where none is,
// not finite; chains that fork count, too. If there are any, nothing is written.
int64_t fsd_exact_walk(const fsd_round* round, const fsd_walked* to, int threads) {
  const int64_t nodes = round->batch * round->count;
  int64_t wrong = outside(round->tokens, nodes, round->columns);
  for (int64_t node = 0; node < nodes; ++node) {
    wrong += round->parents[node] < 0 || round->parents[node] > std::max<int64_t>(node % round->count - 1, 0);
    wrong += round->q && round->q_index[node] >= round->drafts;
  }
  if (round->draft_ids) wrong += outside(round->draft_ids, round->drafted, round->columns);
  if (wrong) return wrong;
  if (round->narrow_p && round->narrow_q) return ExactWalk<bf16, bf16>(*round).run(*to, threads);
  if (round->narrow_p) return ExactWalk<bf16, float>(*round).run(*to, threads);
  if (round->narrow_q) return ExactWalk<float, bf16>(*round).run(*to, threads);
  return ExactWalk<float, float>(*round).run(*to, threads);
}

// Copy x [rows, columns] to out; numbers below the `most`-th largest of their row become `other`. NaN stays.
void fsd_keep_largest(const float* x, int64_t rows, int64_t columns, int64_t most, float other, float* out,
                      int threads) {
#pragma omp parallel num_threads(threads)
  {
    const Share share(rows);
    std::vector<float> largest(most);
    std::vector<int64_t> places(most);
    for (int64_t row = share.begin; row < share.end; ++row) {
      const float* const from = x + row * columns;
      float* const to = out + row * columns;
      select_largest(from, columns, most, largest.data(), places.data());
      keep_from(from, columns, largest[most - 1], other, to);
    }
  }
}

// The bytes of scratch that fsd_stack_forward and fsd_head_step need.
int64_t fsd_scratch(const fsd_stack* stack, const fsd_forward* f) {
  return (int64_t)sizeof(bf16) * Scratch(stack, f).total(f->threads);
}

// Run the layers. If slots or positions are out of range, do nothing and return their number.
int64_t fsd_stack_forward(const fsd_stack* stack, const fsd_forward* f) {
  const int64_t wrong = outside(f);
  if (wrong) return wrong;
#pragma omp parallel num_threads((int)f->threads)
  Forward(stack, f).layers();
  return 0;
}

// Run a head's step. If slots, positions or ids are out of range, do nothing and return their number.
int64_t fsd_head_step(const fsd_stack* stack, const fsd_forward* f, const fsd_head* head, const fsd_step* step) {
  const int64_t wrong = outside(f) + (step->ids ? outside(step->ids, f->batch * f->count, head->embed.columns) : 0);
  if (wrong) return wrong;
#pragma omp parallel num_threads((int)f->threads)
  Forward(stack, f).step(*head, *step);
  return 0;
}

}  // extern "C"
