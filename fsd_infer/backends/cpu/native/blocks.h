// Weights in ggml's block types: their layout in records of 16 columns, and products of few rows.
#pragma once

#include "numbers.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace {

// The layout of a block type. A code q stands for d · (q - BIAS) + m; a run of RUN codes in a column shares d and m.
// Types with several runs per record hold one fp16 d and m, and multiply each by an integer per run. In types with a table,
// a code stands for d · VALUES[q].
template <int BITS_, int RUN_, int RUNS_, int BIAS_, bool LEAST_, bool TABLE_ = false>
struct Form {
  static constexpr int BITS = BITS_, RUN = RUN_, RUNS = RUNS_, BIAS = BIAS_;
  static constexpr bool TABLE = TABLE_;
  static constexpr bool LEAST = LEAST_;                                // has m
  static constexpr int SPAN = RUN * RUNS;                              // codes per record
  static constexpr int STEP = 64 * BITS;                               // bytes of 32 x 16 codes
  static constexpr int CODES = SPAN / 32 * STEP;                       // bytes of a record's codes; integers per run, d and m follow
  static constexpr int PER_RUN = RUNS > 1 ? RUNS * LANES : 0;          // bytes of the integers per run, for d or for m
  static constexpr int FP16 = CODES + PER_RUN * (1 + LEAST);           // offset of d and m
  static constexpr int RECORD = FP16 + 2 * LANES * (1 + LEAST);
  static constexpr int SHIFT = BITS < 8 && !TABLE ? 128 : 0;           // offset of a code as codes_of returns it
};

enum BlockKind : int {  // ggml's type numbers
  Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ2_XXS = 16, KINDS
};

// What codes of IQ2_XXS stand for, as bf16: ±1, ±3.125 and ±5.375.
constexpr bf16 VALUES[LANES] = {0x3F80, 0x4048, 0x40AC, 0, 0, 0, 0, 0, 0xBF80, 0xC048, 0xC0AC};

// Call with(Form) for a block type. Returns false if there is no Form for it.
template <class With>
inline bool with_form(int64_t kind, With with) {
  switch (kind) {
    case Q4_0: return with(Form<4, 32, 1, 8, false>{}), true;
    case Q4_1: return with(Form<4, 32, 1, 0, true>{}), true;
    case Q5_0: return with(Form<5, 32, 1, 16, false>{}), true;
    case Q5_1: return with(Form<5, 32, 1, 0, true>{}), true;
    case Q8_0: return with(Form<8, 32, 1, 0, false>{}), true;
    case Q2_K: return with(Form<4, 16, 16, 0, true>{}), true;
    case Q4_K: return with(Form<4, 32, 8, 0, true>{}), true;
    case Q5_K: return with(Form<5, 32, 8, 0, true>{}), true;
    case Q6_K: return with(Form<6, 16, 16, 32, false>{}), true;
    case IQ2_XXS: return with(Form<4, 32, 8, 0, false, true>{}), true;
    default: return false;
  }
}

// Numbers of rows for which block products are compiled. A group of rows is filled up to one of them.
#ifdef __AMX_BF16__
constexpr int SIZES[] = {1, 2, 4, 6, 8, 12, 16};
#else
constexpr int SIZES[] = {1, 2, 3, 4, 5, 6, 7, 8};
#endif
constexpr int CLASSES = sizeof SIZES / sizeof *SIZES, TOGETHER = SIZES[CLASSES - 1];

// The index of the least size that holds `rows`.
inline int class_of(int rows) {
  int found = 0;
  while (SIZES[found] < rows) ++found;
  return found;
}

// x [rows, depth] in the order in which block products read it. Rows form groups of at most TOGETHER. A group stores,
// for each 32 numbers of depth, those numbers of all its rows, then three sums per row: of all 32 and of each half.
class Interleaved {
  static constexpr int64_t EACH = 32 * sizeof(bf16) + 3 * sizeof(float);  // bytes per row and 32 numbers of depth
  std::vector<char> memory;
  int rows = 0;

 public:
  const bool many;          // many rows: panels are widened to bf16, and x is read in place
  std::vector<bf16> panel;  // one widened panel

  explicit Interleaved(bool many) : many(many) {}

  // Call with(first row, number of rows, index of the group's size, address) for each group.
  template <class With>
  void groups(int64_t depth, With with) {
    const int count = (rows + TOGETHER - 1) / TOGETHER;
    memory.resize(std::max<size_t>(memory.size(), count * TOGETHER * (depth / 32) * EACH));
    char* start = memory.data();
    for (int group = 0, row = 0; group < count; ++group) {
      const int own = (rows - row + count - group - 1) / (count - group), size = class_of(own);
      with(row, own, size, start);
      row += own, start += SIZES[size] * (depth / 32) * EACH;
    }
  }

  void take(const bf16* x, int count, int64_t depth) {
    rows = count;
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    groups(depth, [&](int first, int own, int size, char* start) {
      for (int64_t b = 0; b < depth / 32; ++b, start += SIZES[size] * EACH)
        for (int m = 0; m < SIZES[size]; ++m) {
          const __m512i some =
              m < own ? _mm512_loadu_si512(x + (first + m) * depth + b * 32) : _mm512_setzero_si512();
          _mm512_storeu_si512(start + m * 64, some);
          const __m512 pairs = _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)some, ones);
          const float low = _mm512_mask_reduce_add_ps(0x00FF, pairs), high = _mm512_mask_reduce_add_ps(0xFF00, pairs);
          const float sums[3] = {low + high, low, high};
          for (int i = 0; i < 3; ++i) std::memcpy(start + SIZES[size] * 64 + (i * SIZES[size] + m) * 4, sums + i, 4);
        }
    });
  }
};

// Return pair `pair` of 32 numbers of depth for 16 columns: code + SHIFT or the table's value, as bf16. Codes lie in 16-bit words, one per
// column and member of a pair: the low nibbles of four pairs in each, then planes of the higher bits.
// As bf16, 0x4300 | code is exactly 128 + code.
template <class F>
inline __m512bh codes_of(const uint8_t* codes, int pair) {
  constexpr int AND_OR = 0xEA;
  if (F::BITS == 8) {
    const auto half = [&](int i) {
      const __m128i bytes = _mm_loadu_si128((const __m128i*)(codes + pair * 32 + i * 16));
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    };
    return _mm512_cvtne2ps_pbh(half(1), half(0));
  }
  const __m512i words = _mm512_loadu_si512(codes + pair / 4 * 64);
  if (F::TABLE) {
    const __m512i values = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)VALUES));
    const __m512i which = _mm512_and_si512(_mm512_srli_epi16(words, 4 * (pair % 4)), _mm512_set1_epi16(0x000F));
    return (__m512bh)_mm512_permutexvar_epi16(which, values);
  }
  __m512i found = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 4 * (pair % 4)), _mm512_set1_epi16(0x000F),
                                            _mm512_set1_epi16(0x4300), AND_OR);
  if (F::BITS > 4) {
    constexpr int MORE = F::BITS > 4 ? F::BITS - 4 : 1, EACH = 16 / MORE;  // pairs per word of a plane
    const __m512i plane = _mm512_loadu_si512(codes + 256 + pair / EACH * 64);
    const int at = pair % EACH * MORE - 4;
    const __m512i moved = at > 0 ? _mm512_srli_epi16(plane, at) : _mm512_slli_epi16(plane, -at);
    found = _mm512_ternarylogic_epi32(moved, _mm512_set1_epi16(((1 << MORE) - 1) << 4), found, AND_OR);
  }
  return (__m512bh)found;
}

// Load d and m of one run for 16 columns.
template <class F>
inline void scales_of(const uint8_t* record, int run, __m512& d, __m512& m) {
  const auto fp16 = [&](int i) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(record + F::FP16 + i * 2 * LANES)));
  };
  const auto whole = [&](int i) {
    const uint8_t* const from = record + F::CODES + i * F::PER_RUN + run * LANES;
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
  };
  d = fp16(0);
  m = F::LEAST ? fp16(1) : _mm512_setzero_ps();
  if (F::RUNS == 1) return;
  d = _mm512_mul_ps(d, whole(0));
  if (F::LEAST) m = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), m), whole(1));
}

// total += (m - d · (SHIFT + BIAS)) · Σ x, over the numbers x of one run. sums: as Interleaved has them.
template <int M, class F>
inline void add_least(__m512 d, __m512 least, const char* sums, int run, __m512* total) {
  if (F::SHIFT == 0) return;
  least = _mm512_fnmadd_ps(d, _mm512_set1_ps(F::SHIFT + F::BIAS), least);
  for (int m = 0; m < M; ++m) {
    float sum;
    std::memcpy(&sum, sums + ((F::RUN == 32 ? 0 : 1 + run) * M + m) * 4, sizeof sum);
    total[m] = _mm512_fmadd_ps(least, _mm512_set1_ps(sum), total[m]);
  }
}

#ifdef __AMX_BF16__

// sums [M, 16] = x Wt for M interleaved rows and 16 columns, on tiles that Multiplier::shape_for_blocks has shaped. A run
// adds up products with the codes on a tile, then applies d and m once. Tiles load from memory and store to it, and wait for
// it. So three steps of four runs are under way: codes are unpacked, multiplied, and their products added up.
template <int M, class F>
__attribute__((noinline)) void block_tile(const char* x, int64_t depth, const uint8_t* records, float* sums) {
  constexpr int AHEAD = 4096, STEP = 4, RUNS = 32 / F::RUN;  // runs per step, and per 32 numbers of depth
  constexpr int CODES = F::RUN * LANES;
  alignas(64) uint16_t codes[2][STEP][CODES];
  alignas(64) float dots[2][STEP][M * LANES];
  __m512 total[M];
  for (int m = 0; m < M; ++m) total[m] = _mm512_setzero_ps();
  const int64_t runs = depth / F::RUN;
  const auto unpack = [&](int64_t run, uint16_t* to) {
    const uint8_t* const from = records + run / F::RUNS * F::RECORD + run % F::RUNS / RUNS * F::STEP;
    for (int line = 0; line < F::RECORD * F::RUN / F::SPAN; line += 64)
      _mm_prefetch((const char*)from + AHEAD + line, _MM_HINT_T0);
    const auto each = [&](auto first) {  // pairs are constants, so that shifts are
#pragma GCC unroll 16
      for (int pair = 0; pair < F::RUN / 2; ++pair)
        _mm512_store_si512(to + pair * 32, (__m512i)codes_of<F>(from, first + pair));
    };
    if (run % RUNS) each(std::integral_constant<int, F::RUN / 2>{});
    else each(std::integral_constant<int, 0>{});
  };
  const auto add = [&](int64_t run, const float* own) {
    __m512 d, least;
    scales_of<F>(records + run / F::RUNS * F::RECORD, (int)(run % F::RUNS), d, least);
    for (int m = 0; m < M; ++m) total[m] = _mm512_fmadd_ps(d, _mm512_load_ps(own + m * LANES), total[m]);
    add_least<M, F>(d, least, x + run / RUNS * M * 76 + M * 64, (int)(run % RUNS), total);
  };
#define PRODUCT(I, SUMS, X, CODES_)                                        \
  if (I < count) {                                                         \
    const int64_t run = first + I;                                         \
    _tile_zero(SUMS);                                                      \
    _tile_loadd(X, x + run / RUNS * M * 76 + run % RUNS * 32, 64);         \
    _tile_loadd(CODES_, codes[at][I], 64);                                 \
    _tile_dpbf16ps(SUMS, X, CODES_);                                       \
    _tile_stored(SUMS, dots[at][I], LANES * 4);                            \
  }
  const int64_t steps = (runs + STEP - 1) / STEP;
  for (int64_t step = 0; step < steps + 2; ++step) {
    finish_stores();
    if (step > 0 && step <= steps) {
      const int64_t first = (step - 1) * STEP, at = (step - 1) % 2, count = runs - first;
      PRODUCT(0, 0, 4, 6)
      PRODUCT(1, 1, 5, 7)
      PRODUCT(2, 2, 4, 6)
      PRODUCT(3, 3, 5, 7)
    }
    if (step < steps)
      for (int64_t i = 0, first = step * STEP; i < STEP && first + i < runs; ++i) unpack(first + i, codes[step % 2][i]);
    if (step > 1)
      for (int64_t i = 0, first = (step - 2) * STEP; i < STEP && first + i < runs; ++i)
        add(first + i, dots[step % 2][i]);
  }
#undef PRODUCT
  for (int m = 0; m < M; ++m) _mm512_storeu_ps(sums + m * LANES, total[m]);
}

#else

// sums [M, 16] = x Wt for M interleaved rows and 16 columns. A run adds up products with the codes, then applies d and m
// once. The order of additions is the same for every M, so a row's result does not depend on M.
template <int M, class F>
__attribute__((noinline)) void block_tile(const char* x, int64_t depth, const uint8_t* record, float* sums) {
  constexpr int AHEAD = 4096, PAIRS = F::RUN / 2;
  __m512 total[M];
  for (int m = 0; m < M; ++m) total[m] = _mm512_setzero_ps();
  for (int64_t end = depth / F::SPAN; end > 0; --end, record += F::RECORD)
    for (int part = 0; part < F::SPAN / 32; ++part) {
      const uint8_t* const codes = record + part * F::STEP;
      for (int line = 0; line < F::RECORD * 32 / F::SPAN; line += 64)
        _mm_prefetch((const char*)codes + AHEAD + line, _MM_HINT_T0);
#pragma GCC unroll 2
      for (int run = 0; run < 32 / F::RUN; ++run) {
        __m512 dots[M];
        for (int m = 0; m < M; ++m) dots[m] = _mm512_setzero_ps();
#pragma GCC unroll 16
        for (int pair = run * PAIRS; pair < (run + 1) * PAIRS; ++pair) {
          const __m512bh w = codes_of<F>(codes, pair);
          for (int m = 0; m < M; ++m) {
            int32_t both;
            std::memcpy(&both, x + m * 64 + pair * 4, sizeof both);
            dots[m] = _mm512_dpbf16_ps(dots[m], (__m512bh)_mm512_set1_epi32(both), w);
          }
        }
        __m512 d, least;
        scales_of<F>(record, part * (32 / F::RUN) + run, d, least);
        for (int m = 0; m < M; ++m) total[m] = _mm512_fmadd_ps(d, dots[m], total[m]);
        add_least<M, F>(d, least, x + M * 64, run, total);
      }
      x += M * 76;
    }
  for (int m = 0; m < M; ++m) _mm512_storeu_ps(sums + m * LANES, total[m]);
}

#endif

// Write 16 columns in bf16, each number rounded once; pairs of depth are `stride` numbers apart.
template <class F>
void widen(const uint8_t* record, int64_t depth, bf16* to, int64_t stride) {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) order[i] = (uint16_t)(i / 2 + i % 2 * LANES);
  const __m512i pairs = _mm512_load_si512(order);
  const __m512 worth_none = _mm512_set1_ps(F::SHIFT + F::BIAS);
  constexpr int RUNS = 32 / F::RUN, PAIRS = F::RUN / 2;
  for (int64_t end = depth / F::SPAN; end > 0; --end, record += F::RECORD)
    for (int part = 0; part < F::SPAN / 32; ++part)
#pragma GCC unroll 2
      for (int run = 0; run < RUNS; ++run) {
        __m512 d, m;
        scales_of<F>(record, part * RUNS + run, d, m);  // once: for all that a compiler knows, stores may change them
#pragma GCC unroll 16
        for (int pair = run * PAIRS; pair < (run + 1) * PAIRS; ++pair, to += stride) {
          const __m512i codes = (__m512i)codes_of<F>(record + part * F::STEP, pair);
          const auto worth = [&](__m512i bits) {
            return _mm512_fmadd_ps(d, _mm512_sub_ps(_mm512_castsi512_ps(bits), worth_none), m);
          };
          const __m512 first = worth(_mm512_slli_epi32(codes, 16));
          const __m512 second = worth(_mm512_and_si512(codes, _mm512_set1_epi32((int)0xFFFF0000)));
          _mm512_storeu_si512(to, _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(second, first)));
        }
      }
}

// The products of a block type by class of rows, the depth and bytes of its records, and the codes of a run.
struct Tiles {
  void (*of[CLASSES])(const char* x, int64_t depth, const uint8_t* record, float* sums);
  void (*widen)(const uint8_t* record, int64_t depth, bf16* to, int64_t stride);
  int64_t span, record;
  int run;
};

template <class F, int... I>
Tiles tiles_for(std::integer_sequence<int, I...>) {
  return {{block_tile<SIZES[I], F>...}, widen<F>, F::SPAN, F::RECORD, F::RUN};
}

const Tiles& tiles_of(int64_t kind) {
  static const std::vector<Tiles> known = [] {
    std::vector<Tiles> made(KINDS);
    for (int64_t each = 0; each < KINDS; ++each)
      with_form(each, [&](auto form) { made[each] = tiles_for<decltype(form)>(std::make_integer_sequence<int, CLASSES>{}); });
    return made;
  }();
  return known[kind];
}

}  // namespace
