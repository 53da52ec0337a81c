// Products of few rows with weights in blocks on vectors, in whole numbers, for which the rows of x are rounded.
#pragma once

#include "blocks.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr int SIZES[] = {1, 2, 3, 4, 5, 6, 7, 8};  // numbers of rows for which products are compiled

// What a group of M rows stores for 32 numbers of depth. A number is scale · (128 · high + low), with high and low in int8
// and a power of two for each row. Numbers down to 1/64 of a row's largest are exact, others off by at most 1/16384 of it.
template <int M>
struct alignas(64) Step {
  int8_t high[M][32], low[M][32];
  float sums[3][M];  // of 128 · high + low: all 32, and each half
  float scales[M];   // NaN if one of the 32 is not finite
};

// Write 32 numbers of row m to a step.
template <int M>
inline void put(__m512i numbers, int m, Step<M>& to) {
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

// sum + (d · dots + least · Σ x) of one run of a row. dots: of the codes less BIAS with 128 · high + low.
template <class F, int M>
inline __m512 added(__m512 sum, __m512i dots, __m512 d, __m512 least, const Step<M>& step, int half, int m) {
  __m512 run = _mm512_mul_ps(d, _mm512_cvtepi32_ps(dots));
  if (F::LEAST) run = _mm512_fmadd_ps(least, _mm512_set1_ps(step.sums[F::RUN == 32 ? 0 : 1 + half][m]), run);
  return _mm512_fmadd_ps(_mm512_set1_ps(step.scales[m]), run, sum);
}

// sums [groups, M, 16] = x Wt for groups of M interleaved rows and 16 columns. A run adds up products with the codes, then
// applies d and m once. The order of additions is the same for every M, so a row's result does not depend on it.
template <int M, class F>
__attribute__((noinline)) void block_product(const void* x, int groups, int64_t depth, const uint8_t* records,
                                             float* sums) {
  auto* step = (const Step<M>*)x;
  for (int group = 0; group < groups; ++group, sums += M * LANES) {
    const uint8_t* record = records;
    __m512 total[M];
    for (int m = 0; m < M; ++m) total[m] = _mm512_setzero_ps();
    for (int64_t end = depth / F::SPAN; end > 0; --end, record += F::RECORD)
      for (int part = 0; part < F::SPAN / 32; ++part, ++step) {
        const uint8_t* const codes = record + part * F::STEP;
        fetch(codes, F::RECORD * 32 / F::SPAN);
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

}  // namespace
