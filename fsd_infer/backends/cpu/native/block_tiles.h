// Products of few rows with weights in blocks on AMX tiles: rows of x as they are, with codes in bf16.
#pragma once

#include "blocks.h"

#include <algorithm>
#include <type_traits>

namespace {

constexpr int SIZES[] = {1, 2, 4, 6, 8, 12, 16};  // numbers of rows for which products are compiled

// What a group of M rows stores for 32 numbers of depth. Of each four numbers, 1 and 2 change places, as in bf16_codes.
template <int M>
struct alignas(64) Step {
  bf16 x[M][32];
  float sums[3][M];  // of all 32, and of each half
};

// Write 32 numbers of row m to a step.
template <int M>
inline void put(__m512i numbers, int m, Step<M>& to) {
  _mm512_store_si512(to.x[m], _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(numbers, 0xD8), 0xD8));
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(numbers, 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_andnot_si512(_mm512_set1_epi32(0xFFFF), numbers));
  const __m512 pairs = _mm512_add_ps(even, odd);
  const __m256 low = _mm512_castps512_ps256(pairs), high = _mm512_extractf32x8_ps(pairs, 1);
  const __m256 fours = _mm256_hadd_ps(low, high), eights = _mm256_hadd_ps(fours, fours);
  const __m128 halves = _mm_add_ps(_mm256_castps256_ps128(eights), _mm256_extractf128_ps(eights, 1));
  to.sums[1][m] = _mm_cvtss_f32(halves), to.sums[2][m] = _mm_cvtss_f32(_mm_movehdup_ps(halves));
  to.sums[0][m] = to.sums[1][m] + to.sums[2][m];
}

// The two bytes of 0 to 127 in bf16.
struct Bf16Bytes {
  uint8_t low[128] = {}, high[128] = {};
  constexpr Bf16Bytes() {
    for (int exponent = 0; exponent < 7; ++exponent)
      for (int i = 1 << exponent; i < 2 << exponent; ++i) {
        const int bits = (127 + exponent) << 7 | (i << (7 - exponent) & 127);
        low[i] = (uint8_t)bits, high[i] = (uint8_t)(bits >> 8);
      }
  }
};
alignas(64) constexpr Bf16Bytes BYTES;

// What bf16_codes adds to a code less BIAS.
template <class F>
constexpr float LIFT = F::BITS == 8 ? 0 : F::TABLE ? 192 : 128 + F::BIAS;

// Write 64 numbers in int8 as bf16: pairs of numbers 0 and 2 of each four, then of numbers 1 and 3.
inline void bf16_pairs(__m512i numbers, bf16* to) {
  const __m512i sizes = _mm512_abs_epi8(numbers), least = _mm512_set1_epi8((char)0x80), even = _mm512_set1_epi16(0xFF);
  const auto bytes = [&](const uint8_t* table) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), sizes, _mm512_load_si512(table + 64));
  };
  const __m512i low = bytes(BYTES.low);
  __m512i high = _mm512_ternarylogic_epi32(numbers, least, bytes(BYTES.high), AND_OR);
  high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(numbers, least), _mm512_set1_epi8((char)0xC3));  // of -128
  _mm512_store_si512(to, _mm512_ternarylogic_epi32(even, low, _mm512_slli_epi16(high, 8), SELECT));
  _mm512_store_si512(to + 2 * LANES, _mm512_ternarylogic_epi32(even, _mm512_srli_epi16(low, 8), high, SELECT));
}

// Write a quad's codes of 16 columns, plus LIFT - BIAS, in the order of bf16_pairs. Codes have up to seven bits, and 128 + n
// has those of n at the end of a bf16.
template <class F>
inline void bf16_codes(const uint8_t* codes, int quad, bf16* to) {
  if (F::BITS == 8) return bf16_pairs(quad_of<F>(codes, quad), to);
  const __m512i of_128 = _mm512_set1_epi16(0x4300);
  if (F::BITS == 4 && !F::TABLE) {  // two quads in 64 bytes
    const __m512i both = _mm512_loadu_si512(codes + quad / 2 * 64), four = _mm512_set1_epi16(15);
    for (int odd = 0; odd < 2; ++odd) {
      const __m512i moved = _mm512_srli_epi16(both, quad % 2 * 4 + odd * 8);
      _mm512_store_si512(to + odd * 2 * LANES, _mm512_ternarylogic_epi32(moved, four, of_128, AND_OR));
    }
    return;
  }
  __m512i numbers = quad_of<F>(codes, quad);
  if (F::TABLE) numbers = _mm512_add_epi8(numbers, _mm512_set1_epi8(64));
  for (int odd = 0; odd < 2; ++odd) {
    const __m512i moved = _mm512_srli_epi16(numbers, odd * 8);
    _mm512_store_si512(to + odd * 2 * LANES, _mm512_ternarylogic_epi32(moved, _mm512_set1_epi16(127), of_128, AND_OR));
  }
}

// Write the codes of one run of 16 columns in bf16. records: of the columns.
template <class F>
inline void unpack(const uint8_t* records, int64_t run, bf16* to) {
  constexpr int PARTS = 32 / F::RUN, QUADS = F::RUN / 4;  // runs per 32 numbers of depth, quads per run
  const uint8_t* const from = records + run * F::RUN / F::SPAN * F::RECORD + run * F::RUN % F::SPAN / 32 * F::STEP;
  fetch(from + run % PARTS * (F::STEP / PARTS), F::RECORD * F::RUN / F::SPAN);
  const auto each = [&](auto first) {  // quads are constants, so that shifts are
#pragma GCC unroll 8
    for (int quad = 0; quad < QUADS; ++quad) bf16_codes<F>(from, first + quad, to + quad * 4 * LANES);
  };
  if (run % PARTS) each(std::integral_constant<int, QUADS>{});
  else each(std::integral_constant<int, 0>{});
}

// sums [M, 16] = x Wt for a group of M rows and 16 columns, on tiles that Multiplier::shape_for_blocks has shaped. A run's
// tile adds up products with the codes; d and m are applied to its sums. The order of additions is the same for every M, so
// a row's result does not depend on it. Tiles load from memory and store to it, and wait for it. So several runs are under
// way: codes are unpacked, multiplied, the sums stored, and added up.
template <int M, class F>
inline void group_product(const Step<M>* steps, int64_t depth, const uint8_t* records, float* sums) {
  constexpr int PARTS = 32 / F::RUN;
  constexpr int AHEAD = 3, LAG = 2;  // runs from unpacking to the product, and from there to the addition
  alignas(64) bf16 codes[4][F::RUN * LANES];
  alignas(64) float dots[4][M * LANES];
  const int64_t runs = depth / F::RUN;
  __m512 total[M];
  for (int m = 0; m < M; ++m) total[m] = _mm512_setzero_ps();
  const auto add = [&](int64_t run) {
    __m512 d, least;
    scales_of<F>(records + run * F::RUN / F::SPAN * F::RECORD, (int)(run % (F::SPAN / F::RUN)), d, least);
    least = _mm512_fnmadd_ps(_mm512_set1_ps(LIFT<F>), d, least);
    const float* const of_x = steps[run / PARTS].sums[PARTS == 1 ? 0 : 1 + run % PARTS];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      if (LIFT<F> || F::LEAST) total[m] = _mm512_fmadd_ps(least, _mm512_set1_ps(of_x[m]), total[m]);
      total[m] = _mm512_fmadd_ps(d, _mm512_load_ps(dots[run % 4] + m * LANES), total[m]);
    }
  };
// Multiply one run, and store the sums of the one before.
#define MULTIPLY(SUMS, X, WEIGHTS, BEFORE)                                            \
  if (run < runs) {                                                                   \
    _tile_zero(SUMS);                                                                 \
    _tile_loadd(WEIGHTS, codes[run % 4], 64);                                  \
    _tile_loadd(X, steps[run / PARTS].x[0] + run % PARTS * F::RUN, 64);               \
    _tile_dpbf16ps(SUMS, X, WEIGHTS);                                                 \
  }                                                                                   \
  if (run > 0 && run <= runs) _tile_stored(BEFORE, dots[(run - 1) % 4], LANES * 4);
  for (int64_t run = 0; run < std::min<int64_t>(AHEAD, runs); ++run) unpack<F>(records, run, codes[run]);
  for (int64_t run = 0; run < runs + LAG; ++run) {
    finish_stores();
    if (run % 2) {
      MULTIPLY(1, 5, 7, 0)
    } else {
      MULTIPLY(0, 4, 6, 1)
    }
    if (run + AHEAD < runs) unpack<F>(records, run + AHEAD, codes[(run + AHEAD) % 4]);
    if (run >= LAG) add(run - LAG);
  }
#undef MULTIPLY
  for (int m = 0; m < M; ++m) _mm512_storeu_ps(sums + m * LANES, total[m]);
}

// sums [groups, M, 16] = x Wt for groups of M interleaved rows and 16 columns.
template <int M, class F>
__attribute__((noinline)) void block_product(const void* x, int groups, int64_t depth, const uint8_t* records, float* sums) {
  for (int group = 0; group < groups; ++group)
    group_product<M, F>((const Step<M>*)x + group * (depth / 32), depth, records, sums + group * M * LANES);
}

}  // namespace
