// A forward through decoder layers.
#pragma once

#include "attention.h"
#include "records.h"

namespace {

constexpr int GROUPS = 8;  // most groups of queries whose scores are kept

// A forward's slots, and room for some more.
inline int64_t slots_of(const fsd_forward* f) { return (f->used + 2 * SLOTS - 1) / SLOTS * SLOTS; }

// The parts of a forward's scratch memory. Sizes in bf16 numbers.
struct Scratch {
  int64_t states, projected, attended, gated, scores, own;

  Scratch(const fsd_stack* stack, const fsd_forward* f) {
    const int64_t rows = f->batch * f->count;
    states = rows * stack->hidden;
    projected = rows * (stack->query_heads + 2 * stack->key_heads) * stack->width;
    attended = rows * stack->query_heads * stack->width;
    gated = rows * stack->inner;
    const int64_t weights = 2 * QUERIES * slots_of(f), block = LANES * stack->width, gates = 2 * rows * WIDEST;
    scores = GROUPS * weights;
    own = std::max(weights + block + 2 * LANES * stack->width, gates);  // per thread
  }

  int64_t total(int64_t threads) const { return 4 * states + projected + attended + gated + scores + threads * own; }
};

// One thread's work in a forward. All threads of a team call each member; results are whole after a barrier.
class Forward {
  const fsd_stack* const stack;
  const fsd_forward* const f;
  const int rows;
  const int64_t hidden, width, heads;  // heads: of queries, keys and values
  const Share own_rows;
  Multiplier multiply;
  bf16 *normed, *middle, *projected, *attended, *gated;  // [rows, ...]: norm(x), x + attention, heads, act(gate) · up
  float *scores, *own;                                   // of groups of queries; this thread's memory

 public:
  Forward(const fsd_stack* stack, const fsd_forward* f)
      : stack(stack), f(f), rows((int)(f->batch * f->count)), hidden(stack->hidden), width(stack->width),
        heads(stack->query_heads + 2 * stack->key_heads), own_rows(rows), multiply(f->many) {
    const Scratch scratch(stack, f);
    normed = f->scratch;
    middle = normed + scratch.states;
    projected = normed + 4 * scratch.states;
    attended = projected + scratch.projected;
    gated = attended + scratch.attended;
    scores = (float*)(gated + scratch.gated);
    own = (float*)((bf16*)scores + scratch.scores + omp_get_thread_num() * scratch.own);
  }

  // out = x + attention(norm(x)), then out + mlp(norm(out)). x and out [rows, hidden] are different memory.
  void layer(int64_t index, const bf16* x, bf16* out) {
    const fsd_layer& layer = stack->layers[index];
    project(layer, index == 0 && f->attended ? f->attended : x, x);
#pragma omp barrier
    place(layer, index);
#pragma omp barrier
    attend(index);
#pragma omp barrier
    add_product(x, attended, layer.output, middle);
#pragma omp barrier
    norm(middle, layer.mlp_norm, normed);
#pragma omp barrier
    gate(layer);
#pragma omp barrier
    add_product(middle, gated, layer.down, out);
  }

  // All layers and the final norm, from f->x to f->out.
  void layers() {
    const int64_t size = rows * hidden;
    const bf16* x = f->x;
    for (int64_t l = 0; l < stack->number; ++l) {
      bf16* to = f->outputs[l] ? f->outputs[l] : f->scratch + (2 + l % 2) * size;
      if (l + 1 == stack->number && !f->final_norm) to = f->out;
      layer(l, x, to);
#pragma omp barrier
      x = to;
    }
    if (f->final_norm) norm(x, f->final_norm, f->out);
  }

  // A head's step. Writes f->x, too.
  void step(const fsd_head& head, const fsd_step& s) {
    bf16* const x = const_cast<bf16*>(f->x);
    for (int64_t row = own_rows.begin; row < own_rows.end; ++row) join(head, s, row);
#pragma omp barrier
    product(multiply, s.joined, rows, {&head.fc},
            [&](int row, int64_t column, __m512 sum) { store(x + row * hidden + column, sum); });
#pragma omp barrier
    if (s.inner) {
      add_product(x, s.inner, head.fusion, x);
#pragma omp barrier
    }
    layers();
#pragma omp barrier
    read_out(head, s);
  }

  // y = RMS norm of x, both [rows, hidden].
  void norm(const bf16* x, const bf16* weight, bf16* y) const {
    for (int64_t row = own_rows.begin; row < own_rows.end; ++row)
      rms_norm(x + row * hidden, weight, stack->epsilon, hidden, y + row * hidden);
  }

 private:
  // Join a row's embedding and feature, and norm its inner layers.
  void join(const fsd_head& head, const fsd_step& s, int64_t row) const {
    const int64_t fused = s.inner ? head.fused : 0, depth = head.fc.depth;
    const bf16* const from = s.features + row * (1 + fused) * hidden;
    bf16* const to = s.joined + row * depth;
    if (s.ids) read_row(head.embed, s.ids[row], to);
    else std::memcpy(to, s.embeds + row * (depth - hidden), (depth - hidden) * sizeof(bf16));
    for (int64_t i = 0; i < hidden; i += LANES) {
      const __m512 own = load(from + i);
      store(to + depth - hidden + i, head.feature_scale ? _mm512_div_ps(own, load(head.feature_scale + i)) : own);
    }
    for (int64_t part = 0; part < fused; ++part)
      rms_norm(from + (1 + part) * hidden, head.fusion_norms + part * hidden, head.fusion_epsilon, hidden,
               s.inner + (row * fused + part) * hidden);
  }

  // Logits of f->out.
  void read_out(const fsd_head& head, const fsd_step& s) {
    const int64_t width = head.lm_head.columns + s.extra;
    product(multiply, f->out, rows, {&head.lm_head},
            [&](int row, int64_t column, __m512 sum) { store(s.logits + row * width + column, sum); });
    const Share own_extra(s.extra);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = own_extra.begin; i < own_extra.end; ++i) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t at = 0; at < hidden; at += LANES)
          sum = _mm512_fmadd_ps(load(f->out + row * hidden + at), load(s.more + i * hidden + at), sum);
        s.logits[row * width + head.lm_head.columns + i] = rounded(_mm512_reduce_add_ps(sum));
      }
  }

  // y = base + the linear layer's product with x; base, y [rows, hidden].
  void add_product(const bf16* base, const bf16* x, const fsd_linear& linear, bf16* y) {
    product(multiply, x, rows, {&linear}, [&](int row, int64_t column, __m512 sum) {
      const int64_t at = row * hidden + column;
      store(y + at, _mm512_add_ps(load(base + at), sum));
    });
  }

  // Project to queries, keys and values. `read` is x, or what the first attention reads in its place.
  void project(const fsd_layer& layer, const bf16* read, const bf16* x) {
    if (read == x && layer.input_norm) {
      norm(x, layer.input_norm, normed);
      read = normed;
#pragma omp barrier
    }
    product(multiply, read, rows, {&layer.query, &layer.key, &layer.value},
            [&](int row, int64_t column, __m512 sum) { store(projected + row * heads * width + column, sum); });
  }

  // Rotate queries in place; write rotated keys, and values, to their slots.
  void place(const fsd_layer& layer, int64_t index) {
    const Share own_heads(rows * heads);
    for (int64_t unit = own_heads.begin; unit < own_heads.end; ++unit) {
      const int64_t row = unit / heads, head = unit % heads, side = head - stack->query_heads;
      bf16* const from = projected + unit * width;
      const auto slot = [&](bf16* storage, int64_t which) {
        return storage + index * f->layer_stride + row / f->count * f->batch_stride + which * f->head_stride +
               f->slots[row] * f->slot_stride;
      };
      if (side >= stack->key_heads) {
        std::memcpy(slot(f->values, side - stack->key_heads), from, width * sizeof(bf16));
        continue;
      }
      const bf16* const norm = side < 0 ? layer.query_norm : layer.key_norm;
      if (norm) rms_norm(from, norm, stack->epsilon, width, from);
      const int64_t angle = f->positions[row] * width;
      rotate(from, f->cosine + angle, f->sine + angle, width, side < 0 ? from : slot(f->keys, side));
    }
  }

  // Attention, into `attended`. The threads share the scores of some groups by slots, and then their sums by columns, so that
  // few groups occupy many threads.
  void attend(int64_t index) {
    const int64_t padded = slots_of(f), parts = (stack->query_heads / stack->key_heads * f->count + QUERIES - 1) / QUERIES;
    const int64_t units = f->batch * stack->key_heads * parts;
    int32_t* const block = (int32_t*)(own + QUERIES * padded);
    bf16* const some_keys = (bf16*)(block + LANES * width / 2);
    for (int64_t first = 0; first < units; first += GROUPS) {
      const int64_t count = std::min<int64_t>(GROUPS, units - first);
      if (first) {
#pragma omp barrier
      }
      Group groups[GROUPS];
      for (int64_t unit = 0; unit < count; ++unit) groups[unit] = group_of(index, first + unit, parts);
      share_units(count, [&](int64_t unit, auto part) {
        const Group& group = groups[unit];
        const Share own_slots = part((group.slots + SLOTS - 1) / SLOTS);
        score(multiply, group, own_slots.begin * SLOTS, std::min(own_slots.end * SLOTS, group.slots), width, stack->scale,
              padded, block, some_keys, scores + unit * QUERIES * padded);
      });
#pragma omp barrier
      share_units(count, [&](int64_t unit, auto part) {
        constexpr int64_t LINE = 2 * LANES;  // columns
        const Share lines = part((width + LINE - 1) / LINE);
        if (lines.begin < lines.end)
          ::attend(groups[unit], scores + unit * QUERIES * padded, padded, lines.begin * LINE,
                   std::min(lines.end * LINE, width), own);
      });
    }
  }

  // The queries of a part of a group of heads, at most QUERIES.
  Group group_of(int64_t index, int64_t unit, int64_t parts) const {
    const int64_t key_heads = stack->key_heads, size = stack->query_heads / key_heads, queries = size * f->count;
    const int64_t part = unit % parts, head = unit / parts % key_heads, b = unit / parts / key_heads;
    const int64_t first = queries * part / parts, last = queries * (part + 1) / parts;
    const int64_t at = index * f->layer_stride + b * f->batch_stride + head * f->head_stride;
    Group group{(int)(last - first), {}, {}, {}, f->keys + at, f->values + at, f->slot_stride, 1};
    for (int64_t q = first; q < last; ++q) {
      const int64_t row = b * f->count + q / size, column = (head * size + q % size) * width;
      const uint8_t* const seen = f->visible[index] + row * f->used;
      group.queries[q - first] = projected + row * heads * width + column;
      group.out[q - first] = attended + row * stack->query_heads * width + column;
      group.seen[q - first] = seen;
      const void* const latest = memrchr(seen, 1, f->used);
      if (latest) group.slots = std::max(group.slots, 1 + ((const uint8_t*)latest - seen));
    }
    return group;
  }

  // gated = silu(gate) · up. A thread computes some columns of gates and those of ups that it multiplies.
  void gate(const fsd_layer& layer) {
    const int64_t side = std::max(layer.gate.side, layer.up.side);
    const Share own_parts(stack->inner / side);
    take(multiply, normed, rows, {&layer.gate, &layer.up});
    for (int64_t start = own_parts.begin * side; start < own_parts.end * side; start += side) {
      columns(layer.gate, start, side, [&](int row, int64_t at, __m512 sum) {
        const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.f), exponential(_mm512_sub_ps(_mm512_setzero_ps(), sum)));
        _mm512_storeu_ps(own + row * side + at - start, _mm512_div_ps(sum, below));
      });
      columns(layer.up, start, side, [&](int row, int64_t at, __m512 sum) {
        const __m512 gates = _mm512_loadu_ps(own + row * side + at - start);
        store(gated + row * stack->inner + at, _mm512_mul_ps(gates, sum));
      });
    }
  }

  // The product of `normed` with the columns [start, start + count) of a layer, whole panels; calls done(row, column, 16
  // sums).
  template <class Done>
  void columns(const fsd_linear& linear, int64_t start, int64_t count, Done done) {
    for (int64_t panel = start; panel < start + count; panel += linear.side)
      panel_product(multiply, normed, rows, linear, panel,
                    [&](int row, int at, __m512 sum) { done(row, panel + at, sum); });
  }
};

// Count the numbers outside [0, end).
int64_t outside(const int64_t* numbers, int64_t count, int64_t end) {
  return std::count_if(numbers, numbers + count, [&](int64_t number) { return number < 0 || number >= end; });
}

// Count a forward's slots and positions that are out of range.
int64_t outside(const fsd_forward* f) {
  const int64_t rows = f->batch * f->count;
  return outside(f->slots, rows, f->capacity) + outside(f->positions, rows, f->angles);
}

}  // namespace
