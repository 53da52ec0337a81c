// Products of few rows with weights in blocks, by type and number of rows.
#pragma once

#ifdef __AMX_BF16__
#include "block_tiles.h"
#else
#include "block_vectors.h"
#endif

#include <algorithm>
#include <utility>
#include <vector>

namespace {

constexpr int CLASSES = sizeof SIZES / sizeof *SIZES, TOGETHER = SIZES[CLASSES - 1];

// The index of the least size that holds `rows`. A group of rows is filled up to it.
inline int class_of(int rows) {
  int found = 0;
  while (SIZES[found] < rows) ++found;
  return found;
}

// x [rows, depth] as block products read it: in groups of equal size, of at most TOGETHER rows.
class Interleaved {
  struct alignas(64) Line {
    float numbers[LANES];
  };
  std::vector<Line> memory;
  int rows = 0;

  template <int M>
  void take_as(const bf16* x, int64_t depth) {
    memory.resize(std::max<size_t>(memory.size(), groups * (depth / 32) * sizeof(Step<M>) / sizeof(Line)));
    auto* to = (Step<M>*)memory.data();
    for (int group = 0; group < groups; ++group)
      for (int64_t at = 0; at < depth; at += 32, ++to)
        for (int m = 0; m < M; ++m) {
          const int row = first(group) + m;
          put(row < first(group + 1) ? _mm512_loadu_si512(x + row * depth + at) : _mm512_setzero_si512(), m, *to);
        }
  }

 public:
  const bool many;           // many rows: panels are widened to bf16, and x is read in place
  std::vector<bf16> panel;   // one widened panel
  std::vector<Line> found;   // [groups, size] sums of 16 columns
  int groups = 0, size = 0;  // number of groups, and the index of their size

  explicit Interleaved(bool many) : many(many) {}

  const void* numbers() const { return memory.data(); }

  // The first row of a group.
  int first(int group) const { return rows * group / groups; }

  void take(const bf16* x, int count, int64_t depth) {
    rows = count;
    groups = (rows + TOGETHER - 1) / TOGETHER;
    size = class_of((rows + groups - 1) / groups);
    take_for(x, depth, std::make_integer_sequence<int, CLASSES>{});
    found.resize(groups * SIZES[size]);
  }

 private:
  template <int... I>
  void take_for(const bf16* x, int64_t depth, std::integer_sequence<int, I...>) {
    ((I == size ? take_as<SIZES[I]>(x, depth) : void()), ...);
  }
};

// The products of a block type by class of rows, the depth and bytes of its records, and the codes of a run.
struct Products {
  void (*of[CLASSES])(const void* x, int groups, int64_t depth, const uint8_t* records, float* sums);
  void (*widen)(const uint8_t* record, int64_t depth, bf16* to, int64_t stride);
  int64_t span, record;
  int run;
};

template <class F, int... I>
Products products_for(std::integer_sequence<int, I...>) {
  return {{block_product<SIZES[I], F>...}, widen<F>, F::SPAN, F::RECORD, F::RUN};
}

const Products& products_of(int64_t kind) {
  static const std::vector<Products> known = [] {
    std::vector<Products> made(KINDS);
    for (int64_t each = 0; each < KINDS; ++each)
      with_form(each,
                [&](auto form) { made[each] = products_for<decltype(form)>(std::make_integer_sequence<int, CLASSES>{}); });
    return made;
  }();
  return known[kind];
}

}  // namespace
