// Products of few rows with weights in blocks. They add up whole numbers, for which the rows of x are rounded.
#pragma once

#include "blocks.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace {

// Numbers of rows for which block products are compiled. A group of rows is filled up to one of them.
#ifdef __AMX_INT8__
constexpr int SIZES[] = {1, 2, 4, 6, 8, 9, 12, 16};
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

// What a group of M rows stores for 32 numbers of depth. A number is scale · (128 · high + low), with high and low in int8
// and a power of two for each row. Numbers down to 1/64 of a row's largest are exact, others off by at most 1/16384 of it.
template <int M>
struct alignas(64) Step {
  int8_t high[M][32], low[M][32];
  float sums[3][M];  // of 128 · high + low: all 32, and each half
  float scales[M];   // NaN if one of the 32 is not finite
};

// x [rows, depth] as block products read it: in groups of equal size, of at most TOGETHER rows.
class Interleaved {
  struct alignas(64) Line {
    float numbers[LANES];
  };
  std::vector<Line> memory;
  int rows = 0;

  // Write 32 numbers of row m of M to a step.
  template <int M>
  static void put(__m512i numbers, int m, Step<M>& to) {
    constexpr int LEAST = 27, NONE = 255;  // exponents: smaller ones count as the least, and that of what is not finite
    const __m512i sizes = _mm512_and_si512(numbers, _mm512_set1_epi16(0x7FFF));
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(sizes), _mm512_extracti64x4_epi64(sizes, 1));
    const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const int lacking = _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1))), 0);
    const int exponent = std::max((0xFFFF - lacking) >> 7, LEAST);
    const int scale = exponent == NONE ? 0x7FC00000 : (exponent - 13) << 23;
    std::memcpy(to.scales + m, &scale, sizeof scale);
    const __m512 inverse = _mm512_castsi512_ps(_mm512_set1_epi32((267 - exponent) << 23));
    __m256i halves[2];
    for (int part = 0; part < 2; ++part) {
      const __m256i bits = part ? _mm512_extracti64x4_epi64(numbers, 1) : _mm512_castsi512_si256(numbers);
      const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(wide, inverse));
      _mm_storeu_si128((__m128i*)(to.high[m] + part * LANES), _mm512_cvtepi32_epi8(_mm512_srai_epi32(whole, 7)));
      const __m512i rest = _mm512_and_si512(whole, _mm512_set1_epi32(127));
      _mm_storeu_si128((__m128i*)(to.low[m] + part * LANES), _mm512_cvtepi32_epi8(rest));
      halves[part] = _mm256_add_epi32(_mm512_castsi512_si256(whole), _mm512_extracti64x4_epi64(whole, 1));
    }
    const __m256i fours = _mm256_hadd_epi32(halves[0], halves[1]), twos = _mm256_hadd_epi32(fours, fours);
    const __m128i both = _mm_add_epi32(_mm256_castsi256_si128(twos), _mm256_extracti128_si256(twos, 1));
    to.sums[1][m] = (float)_mm_cvtsi128_si32(both), to.sums[2][m] = (float)_mm_extract_epi32(both, 1);
    to.sums[0][m] = to.sums[1][m] + to.sums[2][m];
  }

  template <int M>
  void take_as(const bf16* x, int64_t depth) {
    memory.resize(std::max<size_t>(memory.size(), groups * (depth / 32) * sizeof(Step<M>) / sizeof(Line)));
    auto* to = (Step<M>*)memory.data();
    for (int group = 0; group < groups; ++group)
      for (int64_t at = 0; at < depth; at += 32, ++to)
        for (int m = 0; m < M; ++m) {
          const int row = first(group) + m;
          put<M>(row < first(group + 1) ? _mm512_loadu_si512(x + row * depth + at) : _mm512_setzero_si512(), m, *to);
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

// sum + (d · dots + least · Σ x) of one run of a row. dots: of the codes less BIAS with 128 · high + low.
template <class F, int M>
inline __m512 added(__m512 sum, __m512i dots, __m512 d, __m512 least, const Step<M>& step, int half, int m) {
  __m512 run = _mm512_mul_ps(d, _mm512_cvtepi32_ps(dots));
  if (F::LEAST) run = _mm512_fmadd_ps(least, _mm512_set1_ps(step.sums[F::RUN == 32 ? 0 : 1 + half][m]), run);
  return _mm512_fmadd_ps(_mm512_set1_ps(step.scales[m]), run, sum);
}

// Fetch the codes that lie AHEAD of 32 numbers of depth, so that memory is busy while they are multiplied.
template <class F>
inline void fetch(const uint8_t* codes, int bytes) {
  constexpr int AHEAD = 4096;
  for (int line = 0; line < bytes; line += 64) _mm_prefetch((const char*)codes + AHEAD + line, _MM_HINT_T0);
}

// sums [groups, M, 16] = x Wt for groups of M interleaved rows and 16 columns, on vectors. A run adds up products with the
// codes, then applies d and m once. The order of additions is the same for every M and on tiles, so a row's result depends
// on neither.
template <int M, class F>
__attribute__((noinline)) void block_on_vectors(const void* x, int groups, int64_t depth, const uint8_t* records,
                                                float* sums) {
  auto* step = (const Step<M>*)x;
  for (int group = 0; group < groups; ++group, sums += M * LANES) {
    const uint8_t* record = records;
    __m512 total[M];
    for (int m = 0; m < M; ++m) total[m] = _mm512_setzero_ps();
    for (int64_t end = depth / F::SPAN; end > 0; --end, record += F::RECORD)
      for (int part = 0; part < F::SPAN / 32; ++part, ++step) {
        const uint8_t* const codes = record + part * F::STEP;
        fetch<F>(codes, F::RECORD * 32 / F::SPAN);
#pragma GCC unroll 2
        for (int half = 0; half < 32 / F::RUN; ++half) {
          __m512i high[M], low[M];
          for (int m = 0; m < M; ++m) high[m] = low[m] = _mm512_setzero_si512();
#pragma GCC unroll 8
          for (int quad = half * F::RUN / 4; quad < (half + 1) * F::RUN / 4; ++quad) {
            const __m512i w = raised<F>(quad_of<F>(codes, quad));
            for (int m = 0; m < M; ++m) {
              int32_t highs, lows;
              std::memcpy(&highs, step->high[m] + quad * 4, 4);
              std::memcpy(&lows, step->low[m] + quad * 4, 4);
              high[m] = _mm512_dpbusd_epi32(high[m], w, _mm512_set1_epi32(highs));
              low[m] = _mm512_dpbusd_epi32(low[m], w, _mm512_set1_epi32(lows));
            }
          }
          __m512 d, least;
          scales_of<F>(record, part * (32 / F::RUN) + half, d, least);
          for (int m = 0; m < M; ++m) {
            __m512i dots = _mm512_add_epi32(_mm512_slli_epi32(high[m], 7), low[m]);
            if (F::LIFT) {
              const __m512 lifted = _mm512_set1_ps(F::LIFT * step->sums[F::RUN == 32 ? 0 : 1 + half][m]);
              dots = _mm512_sub_epi32(dots, _mm512_cvtps_epi32(lifted));
            }
            total[m] = added<F>(total[m], dots, d, least, *step, half, m);
          }
        }
      }
    for (int m = 0; m < M; ++m) _mm512_storeu_ps(sums + m * LANES, total[m]);
  }
}

#ifdef __AMX_INT8__

// block_on_vectors for one group, on tiles that Multiplier::shape_for_blocks has shaped. Tiles load from memory and store to
// it, and wait for it. So several runs are under way: codes are unpacked, multiplied, the products stored, and added up.
template <int M, class F>
inline void group_on_tiles(const Step<M>* steps, int64_t depth, const uint8_t* records, float* sums) {
  constexpr int PARTS = 32 / F::RUN;        // runs per 32 numbers of depth
  constexpr bool AS_STORED = F::BITS == 8;  // codes need no unpacking
  constexpr bool APART = 2 * M > LANES;     // high and low bytes take two tiles
  alignas(64) int8_t codes[4][AS_STORED ? 1 : F::RUN * LANES];
  alignas(64) int32_t dots[4][2 * M * LANES];  // of high bytes, then of low ones
  const int64_t runs = depth / F::RUN;
  __m512 total[M];
  for (int m = 0; m < M; ++m) total[m] = _mm512_setzero_ps();
  const auto codes_at = [&](int64_t run) {  // of the 32 numbers with the run
    return records + run * F::RUN / F::SPAN * F::RECORD + run * F::RUN % F::SPAN / 32 * F::STEP;
  };
  const auto unpack = [&](int64_t run) {
    if (run >= runs) return;
    const uint8_t* const from = codes_at(run);
    fetch<F>(from + run % PARTS * (F::STEP / PARTS), F::RECORD * F::RUN / F::SPAN);
    if (AS_STORED) return;
    const auto each = [&](auto first) {  // quads are constants, so that shifts are
#pragma GCC unroll 8
      for (int quad = 0; quad < F::RUN / 4; ++quad)
        _mm512_store_si512(codes[run % 4] + quad * 64, centred<F>(quad_of<F>(from, first + quad)));
    };
    if (run % PARTS) each(std::integral_constant<int, F::RUN / 4>{});
    else each(std::integral_constant<int, 0>{});
  };
  const auto add = [&](int64_t run) {
    const int32_t* const own = dots[run % 4];
    __m512 d, least;
    scales_of<F>(records + run * F::RUN / F::SPAN * F::RECORD, (int)(run % (F::SPAN / F::RUN)), d, least);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const __m512i high = _mm512_load_si512(own + m * LANES), low = _mm512_load_si512(own + (M + m) * LANES);
      const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
      total[m] = added<F>(total[m], both, d, least, steps[run / PARTS], (int)(run % PARTS), m);
    }
  };
// Tiles: HIGH for sums of all bytes, or of high ones and LOW for the others, and CODES. They still hold those of run - 2.
#define MULTIPLY(HIGH, LOW, CODES)                                              \
  if (run >= 2) {                                                               \
    _tile_stored(HIGH, dots[(run - 2) % 4], LANES * 4);                         \
    if (APART) _tile_stored(LOW, dots[(run - 2) % 4] + M * LANES, LANES * 4);   \
  }                                                                             \
  if (run < runs) {                                                             \
    const Step<M>& own = steps[run / PARTS];                                    \
    _tile_zero(HIGH);                                                           \
    if (AS_STORED) _tile_loadd(CODES, codes_at(run), 64);                       \
    else _tile_loadd(CODES, codes[run % 4], 64);                                \
    _tile_loadd(4, own.high[0] + run % PARTS * F::RUN, 32);                     \
    _tile_dpbssd(HIGH, 4, CODES);                                               \
    if (APART) {                                                                \
      _tile_zero(LOW);                                                          \
      _tile_loadd(5, own.low[0] + run % PARTS * F::RUN, 32);                    \
      _tile_dpbssd(LOW, 5, CODES);                                              \
    }                                                                           \
  }
  constexpr int LAG = 3;  // runs from a product to its addition
  unpack(0);
  unpack(1);
  for (int64_t run = 0; run < runs + LAG; ++run) {
    finish_stores();
    if (run % 2) {
      MULTIPLY(2, 3, 7)
    } else {
      MULTIPLY(0, 1, 6)
    }
    unpack(run + 2);
    if (run >= LAG) add(run - LAG);
  }
#undef MULTIPLY
  for (int m = 0; m < M; ++m) _mm512_storeu_ps(sums + m * LANES, total[m]);
}

template <int M, class F>
__attribute__((noinline)) void block_on_tiles(const void* x, int groups, int64_t depth, const uint8_t* records,
                                              float* sums) {
  for (int group = 0; group < groups; ++group)
    group_on_tiles<M, F>((const Step<M>*)x + group * (depth / 32), depth, records, sums + group * M * LANES);
}

constexpr int MOST_ON_VECTORS = 4;  // rows

#else

constexpr int MOST_ON_VECTORS = TOGETHER;

#endif

// The products of a block type by class of rows, the depth and bytes of its records, and the codes of a run.
struct Products {
  void (*of[CLASSES])(const void* x, int groups, int64_t depth, const uint8_t* records, float* sums);
  void (*widen)(const uint8_t* record, int64_t depth, bf16* to, int64_t stride);
  int64_t span, record;
  int run;
};

template <int M, class F>
constexpr auto block_product() {
#ifdef __AMX_INT8__
  if constexpr (M > MOST_ON_VECTORS) return block_on_tiles<M, F>;
  else
#endif
    return block_on_vectors<M, F>;
}

template <class F, int... I>
Products products_for(std::integer_sequence<int, I...>) {
  return {{block_product<SIZES[I], F>()...}, widen<F>, F::SPAN, F::RECORD, F::RUN};
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
