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
#elif defined(__AVX512F__)
constexpr int SIZES[] = {1, 2, 3, 4, 5, 6, 7, 8};
#else
constexpr int SIZES[] = {1, 2, 3, 4};  // whose sums fit 16 registers
#endif
#ifdef __AVX512F__
constexpr bool WIDENS = true;  // weights for many rows to bf16
#else
constexpr bool WIDENS = false;  // products of whole numbers are faster than those of bf16 for any number of rows
#endif
constexpr int CLASSES = sizeof SIZES / sizeof *SIZES, TOGETHER = SIZES[CLASSES - 1];

constexpr int NEAR = 16;  // groups that stay in the second cache while they are multiplied with several columns

// The index of the least size that holds `rows`.
inline int class_of(int rows) {
  int found = 0;
  while (SIZES[found] < rows) ++found;
  return found;
}

// What a group of M rows stores for 32 numbers of depth. A number is scale · (2^LOW · high + low), with high and low in int8
// and a power of two for each row. The high bytes of PIECE numbers lie beside their low ones. Without AVX-512, a number is
// stored whole, in 16 bits, and the second and third of each quad change places. With 4 bits in low bytes, numbers down to
// 1/8 of a row's largest are exact, others off by at most 1/2048 of it; with 7, 1/64 and 1/16384. A number that dwarfs the
// other 31, as outliers of activations do, is held apart, so that it takes no bits from them.
template <int M>
struct alignas(64) Step {
  int8_t bytes[M][64];
  int32_t sums[3][M];  // of 2^LOW · high + low: all 32, and each half
  float scales[M];     // NaN if one of the 32 is not finite
  float apart[M];      // numbers held apart
  uint8_t where[M];    // their places among the 32
  uint32_t outlying;   // a bit per row that has one

  int32_t sum(int run, int half, int m) const { return sums[run == 32 ? 0 : 1 + half][m]; }
};

enum Layout : int { JOINED_32, JOINED_16, SEVEN_BITS, LAYOUTS };  // of Step: with 4 bits and PIECE, or with 7 bits

template <class F>
constexpr Layout layout_of = !F::JOINED ? SEVEN_BITS : F::RUN == 32 ? JOINED_32 : JOINED_16;

// x as products with other weights read it.
#ifdef __AVX512F__
using Plain = bf16;
#else
using Plain = float;
#endif

// x [rows, depth] as block products read it: in groups of equal size, of at most TOGETHER rows.
class Interleaved {
  struct alignas(64) Line {
    float numbers[LANES];
  };
  std::vector<Line> memory[LAYOUTS];
  size_t lines[LAYOUTS];  // of a group
  std::vector<float> wide;  // x for other products, where they do not read bf16
  int rows = 0;

  // The largest of 32 bf16 numbers without signs, as bits.
  static int largest(__m512i sizes) {
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(sizes), _mm512_extracti64x4_epi64(sizes, 1));
    const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return 0xFFFF - _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1))), 0);
  }

  // Write 32 numbers of row m of M to a step.
  template <Layout L, int M>
  static void put(__m512i numbers, int m, Step<M>& to) {
    constexpr int LOW = L == SEVEN_BITS ? 7 : 4;
    [[maybe_unused]] constexpr int PIECE = L == JOINED_16 ? 16 : 32;
    constexpr int LEAST = 27, NONE = 255;  // exponents: smaller ones count as the least, and that of what is not finite
    const __m512i signless = _mm512_set1_epi16(0x7FFF);
    const __m512i sizes = _mm512_and_si512(numbers, signless);
    int exponent = std::max(largest(sizes) >> 7, LEAST);
    if (exponent != NONE && exponent > LEAST) {
      const __mmask32 large = _mm512_cmpge_epu16_mask(sizes, _mm512_set1_epi16((short)((exponent - 2) << 7)));
      if (!(large & (large - 1))) {  // the others are less than a quarter of it
        alignas(64) bf16 all[32];
        _mm512_store_si512(all, numbers);
        const int place = __builtin_ctz(large);
        const uint32_t bits = (uint32_t)all[place] << 16;
        std::memcpy(to.apart + m, &bits, sizeof bits);
        to.where[m] = (uint8_t)place, to.outlying |= 1u << m;
        numbers = _mm512_mask_mov_epi16(numbers, large, _mm512_setzero_si512());
        exponent = std::max(largest(_mm512_and_si512(numbers, signless)) >> 7, LEAST);
      }
    }
    const int scale = exponent == NONE ? 0x7FC00000 : (exponent - 6 - LOW) << 23;
    std::memcpy(to.scales + m, &scale, sizeof scale);
    const __m512 inverse = _mm512_castsi512_ps(_mm512_set1_epi32((260 + LOW - exponent) << 23));
    __m256i halves[2];
    for (int part = 0; part < 2; ++part) {
      const __m256i bits = part ? _mm512_extracti64x4_epi64(numbers, 1) : _mm512_castsi512_si256(numbers);
      const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(wide, inverse));
#ifdef __AVX512F__
      int8_t* const high = to.bytes[m] + (PIECE == 16 ? 32 : 16) * part;
      _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(_mm512_srai_epi32(whole, LOW)));
      const __m512i rest = _mm512_and_si512(whole, _mm512_set1_epi32((1 << LOW) - 1));
      _mm_storeu_si128((__m128i*)(high + PIECE), _mm512_cvtepi32_epi8(rest));
#else
      _mm256_storeu_si256((__m256i*)to.bytes[m] + part, words_by_quads(whole));
#endif
      halves[part] = _mm256_add_epi32(_mm512_castsi512_si256(whole), _mm512_extracti64x4_epi64(whole, 1));
    }
    const __m256i fours = _mm256_hadd_epi32(halves[0], halves[1]), twos = _mm256_hadd_epi32(fours, fours);
    const __m128i both = _mm_add_epi32(_mm256_castsi256_si128(twos), _mm256_extracti128_si256(twos, 1));
    to.sums[1][m] = _mm_cvtsi128_si32(both), to.sums[2][m] = _mm_extract_epi32(both, 1);
    to.sums[0][m] = to.sums[1][m] + to.sums[2][m];
  }

  template <Layout L, int M>
  void take_as(const bf16* x, int64_t depth) {
    auto& own = memory[L];
    lines[L] = depth / 32 * sizeof(Step<M>) / sizeof(Line);
    own.resize(std::max<size_t>(own.size(), groups * lines[L]));
    auto* to = (Step<M>*)own.data();
    for (int group = 0; group < groups; ++group)
      for (int64_t at = 0; at < depth; at += 32, ++to) {
        to->outlying = 0;
        for (int m = 0; m < M; ++m) {
          const int row = first(group) + m;
          put<L>(row < first(group + 1) ? _mm512_loadu_si512(x + row * depth + at) : _mm512_setzero_si512(), m, *to);
        }
      }
  }

 public:
  const bool many;           // many rows: panels are widened to bf16, and x is read in place
  std::vector<bf16> panel;   // one widened panel
  std::vector<Line> found;   // [NEAR, size] sums of 16 columns of groups
  int groups = 0, size = 0;  // number of groups, and the index of their size

  explicit Interleaved(bool many) : many(many && WIDENS) {}

  const void* numbers(Layout layout, int group) const { return memory[layout].data() + group * lines[layout]; }

  void take_plain([[maybe_unused]] const bf16* x, [[maybe_unused]] int64_t count) {
#ifndef __AVX512F__
    wide.resize(std::max<size_t>(wide.size(), count));
    for (int64_t at = 0; at < count; at += LANES) _mm512_storeu_ps(wide.data() + at, load(x + at));
#endif
  }

  const Plain* plain_numbers([[maybe_unused]] const bf16* x) const {
#ifdef __AVX512F__
    return x;
#else
    return wide.data();
#endif
  }

  // The first row of a group.
  int first(int group) const { return rows * group / groups; }

  void take(const bf16* x, int count, int64_t depth, Layout layout) {
    rows = count;
    groups = (rows + TOGETHER - 1) / TOGETHER;
    size = class_of((rows + groups - 1) / groups);
    constexpr auto sizes = std::make_integer_sequence<int, CLASSES>{};
    if (layout == JOINED_32) take_for<JOINED_32>(x, depth, sizes);
    else if (layout == JOINED_16) take_for<JOINED_16>(x, depth, sizes);
    else take_for<SEVEN_BITS>(x, depth, sizes);
    found.resize(std::min(groups, NEAR) * SIZES[size]);
  }

 private:
  template <Layout L, int... I>
  void take_for(const bf16* x, int64_t depth, std::integer_sequence<int, I...>) {
    ((I == size ? take_as<L, SIZES[I]>(x, depth) : void()), ...);
  }
};

// sum + (d · dots + least · Σ x) of one run of a row. dots: of the codes less BIAS with 2^LOW · high + low.
template <class F, int M>
inline __m512 added(__m512 sum, __m512i dots, __m512 d, __m512 least, const Step<M>& step, int half, int m) {
  __m512 run = _mm512_mul_ps(d, _mm512_cvtepi32_ps(dots));
  if (F::LEAST) run = _mm512_fmadd_ps(least, _mm512_set1_ps((float)step.sum(F::RUN, half, m)), run);
  return _mm512_fmadd_ps(_mm512_set1_ps(step.scales[m]), run, sum);
}

// Add the numbers of a run that are held apart to their rows' sums. codes: of the step's 32 numbers of depth.
template <class F, int M>
inline void add_outlying(__m512 (&sums)[M], __m512 d, __m512 least, const Step<M>& step, int half, const uint8_t* codes) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    const int place = step.where[m];
    if (!(step.outlying >> m & 1) || place / F::RUN != half) continue;
    const __m512i quad = centred<F>(quad_of<F>(codes, place / 4));
    const __m512i code = _mm512_srai_epi32(_mm512_sllv_epi32(quad, _mm512_set1_epi32(24 - place % 4 * 8)), 24);
    const __m512 weights = _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(code), least);
    sums[m] = _mm512_fmadd_ps(_mm512_set1_ps(step.apart[m]), weights, sums[m]);
  }
}

// Fetch what lies AHEAD of a part of a weight, so that memory is busy while that is multiplied. To the second cache: the
// first has too few buffers for all that must be under way.
inline void fetch_ahead(const void* part, int bytes) {
  constexpr int AHEAD = 8192;
  fetch<_MM_HINT_T1>((const char*)part + AHEAD, bytes);
}

// dots [M, 16] of a run's codes less BIAS with 2^LOW · high + low. codes: of the step's 32 numbers of depth.
template <class F, int M>
__attribute__((always_inline)) inline void dots_of(const uint8_t* codes, int half, const Step<M>& step, __m512i (&dots)[M]) {
#ifdef __AVX512F__
  __m512i high[M];
  for (int m = 0; m < M; ++m) {
    high[m] = _mm512_setzero_si512();
    dots[m] = _mm512_set1_epi32(-F::LIFT * step.sum(F::RUN, half, m));
  }
#pragma GCC unroll 8
  for (int quad = half * F::RUN / 4; quad < (half + 1) * F::RUN / 4; ++quad) {
    const __m512i w = raised<F>(quad_of<F>(codes, quad));
    const int at = quad * 4 / F::PIECE * 2 * F::PIECE + quad * 4 % F::PIECE;
    for (int m = 0; m < M; ++m) {
      int32_t highs, lows;
      std::memcpy(&highs, step.bytes[m] + at, 4);
      std::memcpy(&lows, step.bytes[m] + at + F::PIECE, 4);
      high[m] = _mm512_dpbusd_epi32(high[m], w, _mm512_set1_epi32(highs));
      dots[m] = _mm512_dpbusd_epi32(dots[m], w, _mm512_set1_epi32(lows));
    }
  }
  for (int m = 0; m < M; ++m) dots[m] = _mm512_add_epi32(_mm512_slli_epi32(high[m], F::LOW), dots[m]);
#else
  for (int m = 0; m < M; ++m) dots[m] = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int quad = half * F::RUN / 4; quad < (half + 1) * F::RUN / 4; ++quad) {
    const __m512i w = centred<F>(quad_of<F>(codes, quad));
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8), odd = _mm512_srai_epi16(w, 8);
    for (int m = 0; m < M; ++m) {
      int32_t evens, odds;
      std::memcpy(&evens, step.bytes[m] + quad * 8, 4);
      std::memcpy(&odds, step.bytes[m] + quad * 8 + 4, 4);
      dots[m] = _mm512_add_epi32(dots[m], _mm512_madd_epi16(even, _mm512_set1_epi32(evens)));
      dots[m] = _mm512_add_epi32(dots[m], _mm512_madd_epi16(odd, _mm512_set1_epi32(odds)));
      in_registers(dots[m]);
    }
  }
#endif
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
        fetch_ahead(codes, F::RECORD * 32 / F::SPAN);
#pragma GCC unroll 2
        for (int half = 0; half < 32 / F::RUN; ++half) {
          __m512i dots[M];
          dots_of<F>(codes, half, *step, dots);
          __m512 d, least;
          scales_of<F>(record, part * (32 / F::RUN) + half, d, least);
          for (int m = 0; m < M; ++m) total[m] = added<F>(total[m], dots[m], d, least, *step, half, m);
          if (step->outlying) [[unlikely]] add_outlying<F>(total, d, least, *step, half, codes);
        }
      }
    for (int m = 0; m < M; ++m) _mm512_storeu_ps(sums + m * LANES, total[m]);
  }
}

#ifdef __AMX_INT8__

// Write a run's codes of four bits less BIAS, 16 times each and then plain: [2, RUN / 4, 16, 4].
template <class F>
inline void write_joined(const uint8_t* codes, int8_t* to) {
  const __m512i upper = _mm512_set1_epi8((char)0xF0);
  const auto write = [&](int quad, __m512i sixteen_times, __m512i plain) {
    if (F::BIAS) sixteen_times = _mm512_xor_si512(sixteen_times, _mm512_set1_epi8((char)0x80));
    _mm512_store_si512(to + quad * 64, sixteen_times);
    _mm512_store_si512(to + (F::RUN / 4 + quad) * 64, centred<F>(plain));
  };
#pragma GCC unroll 4
  for (int quad = 0; quad < F::RUN / 4; quad += 2) {
    const __m512i both = _mm512_loadu_si512(codes + quad * 32);
    const __m512i odd = _mm512_and_si512(both, upper), even = _mm512_andnot_si512(upper, both);
    write(quad, _mm512_slli_epi16(even, 4), even);
    write(quad + 1, odd, _mm512_srli_epi16(odd, 4));
  }
}

// block_on_vectors for one group, on tiles that Multiplier::shape_for_blocks has shaped. Tiles load from memory and store to
// it, and wait for it. So several runs are under way: codes are unpacked, multiplied, the products stored, and added up.
//
// Where 16 times a code fits a byte, one product with 16 · code and code joins high and low bytes. Otherwise they have sums of
// their own, [M, 2, 16].
template <int M, class F>
inline void group_on_tiles(const Step<M>* steps, int64_t depth, const uint8_t* records, float* sums) {
  constexpr int PARTS = 32 / F::RUN;                   // runs per 32 numbers of depth
  constexpr int QUADS = F::RUN / 4;                    // per run
  constexpr bool AS_STORED = F::BITS == 8;             // codes need no unpacking
  constexpr bool APART = !F::JOINED && 2 * M > LANES;  // high and low bytes take two tiles
  constexpr int SUMS = F::JOINED ? LANES : 2 * LANES;  // of a row
  alignas(64) int8_t codes[4][AS_STORED ? 1 : (1 + F::JOINED) * F::RUN * LANES];
  alignas(64) int32_t dots[4][M * SUMS];
  const int64_t runs = depth / F::RUN;
  __m512 total[M];
  for (int m = 0; m < M; ++m) total[m] = _mm512_setzero_ps();
  const auto codes_at = [&](int64_t run) {  // of the 32 numbers with the run
    return records + run * F::RUN / F::SPAN * F::RECORD + run * F::RUN % F::SPAN / 32 * F::STEP;
  };
  const auto unpack = [&](int64_t run) {
    if (run >= runs) return;
    const uint8_t* const from = codes_at(run);
    fetch_ahead(from + run % PARTS * (F::STEP / PARTS), F::RECORD * F::RUN / F::SPAN);
    if (AS_STORED) return;
    int8_t* const to = codes[run % 4];
    if (F::JOINED) return write_joined<F>(from + run % PARTS * (F::STEP / PARTS), to);
    const auto each = [&](auto first) {  // quads are constants, so that shifts are
#pragma GCC unroll 8
      for (int quad = 0; quad < QUADS; ++quad)
        _mm512_store_si512(to + quad * 64, centred<F>(quad_of<F>(from, first + quad)));
    };
    if (run % PARTS) each(std::integral_constant<int, QUADS>{});
    else each(std::integral_constant<int, 0>{});
  };
  const auto add = [&](int64_t run) {
    const Step<M>& step = steps[run / PARTS];
    const int half = (int)(run % PARTS);
    __m512 d, least;
    scales_of<F>(records + run * F::RUN / F::SPAN * F::RECORD, (int)(run % (F::SPAN / F::RUN)), d, least);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const int32_t* const own = dots[run % 4] + m * SUMS;
      __m512i dot = _mm512_load_si512(own);
      if (!F::JOINED) dot = _mm512_add_epi32(_mm512_slli_epi32(dot, F::LOW), _mm512_load_si512(own + LANES));
      total[m] = added<F>(total[m], dot, d, least, step, half, m);
    }
    if (step.outlying) [[unlikely]] add_outlying<F>(total, d, least, step, half, codes_at(run));
  };
// Tiles: FIRST for joined sums, those of all bytes, or of high ones, SECOND for low ones, and CODES. FIRST and SECOND still
// hold sums of run - 2.
#define MULTIPLY(FIRST, SECOND, OWN, CODES)                                        \
  if (run >= 2) {                                                                  \
    _tile_stored(FIRST, dots[(run - 2) % 4], (APART ? SUMS : LANES) * 4);          \
    if (APART) _tile_stored(SECOND, dots[(run - 2) % 4] + LANES, SUMS * 4);        \
  }                                                                                \
  if (run < runs) {                                                                \
    const int8_t* const x = steps[run / PARTS].bytes[0];                           \
    _tile_zero(FIRST);                                                             \
    if (AS_STORED) _tile_loadd(CODES, codes_at(run), 64);                          \
    else _tile_loadd(CODES, codes[run % 4], 64);                                   \
    if (F::JOINED) {                                                               \
      _tile_loadd(OWN, x + run % PARTS * 2 * F::RUN, 64);                          \
      if (F::BIAS) _tile_dpbssd(FIRST, OWN, CODES);                                \
      else _tile_dpbsud(FIRST, OWN, CODES);                                        \
    } else {                                                                       \
      _tile_loadd(4, x + run % PARTS * F::RUN, APART ? 64 : 32);                   \
      _tile_dpbssd(FIRST, 4, CODES);                                               \
    }                                                                              \
    if (APART) {                                                                   \
      _tile_zero(SECOND);                                                          \
      _tile_loadd(5, x + 32 + run % PARTS * F::RUN, 64);                           \
      _tile_dpbssd(SECOND, 5, CODES);                                              \
    }                                                                              \
  }
  constexpr int LAG = 3;  // runs from a product to its addition
  unpack(0);
  unpack(1);
  for (int64_t run = 0; run < runs + LAG; ++run) {
    finish_stores();
    if (run % 2) {
      MULTIPLY(2, 3, 5, 7)
    } else {
      MULTIPLY(0, 1, 4, 6)
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
  bool joined;
  Layout layout;
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
  return {{block_product<SIZES[I], F>()...}, widen<F>, F::SPAN, F::RECORD, F::RUN, F::JOINED, layout_of<F>};
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
