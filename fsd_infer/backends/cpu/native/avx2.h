// AVX-512's operations, as far as the kernels use them, in pairs of 256-bit vectors for processors without AVX-512.
//
// The kernels are written once, with AVX-512's names. The names below stand in this file's namespace, where they hide the
// compiler's. An operation gives what Intel's manual defines for it, but for numbers that lose bits: denormal bf16 numbers
// are kept, and products of bf16 pairs are rounded after each addition.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

struct Floats {
  __m256 low, high;
};

struct Integers {
  __m256i low, high;
};

using __m512 = Floats;
using __m512i = Integers;
using __m512bh = Integers;

// Operations on halves.
#define BINARY(NAME, HALF, TYPE) \
  inline TYPE NAME(TYPE a, TYPE b) { return {HALF(a.low, b.low), HALF(a.high, b.high)}; }
#define TERNARY(NAME, HALF, TYPE) \
  inline TYPE NAME(TYPE a, TYPE b, TYPE c) { return {HALF(a.low, b.low, c.low), HALF(a.high, b.high, c.high)}; }
#define SHIFT(NAME, HALF) \
  inline Integers NAME(Integers a, int bits) { return {HALF(a.low, bits), HALF(a.high, bits)}; }
BINARY(_mm512_add_ps, _mm256_add_ps, Floats)
BINARY(_mm512_sub_ps, _mm256_sub_ps, Floats)
BINARY(_mm512_mul_ps, _mm256_mul_ps, Floats)
BINARY(_mm512_div_ps, _mm256_div_ps, Floats)
BINARY(_mm512_max_ps, _mm256_max_ps, Floats)
TERNARY(_mm512_fmadd_ps, _mm256_fmadd_ps, Floats)
TERNARY(_mm512_fnmadd_ps, _mm256_fnmadd_ps, Floats)
BINARY(_mm512_and_si512, _mm256_and_si256, Integers)
BINARY(_mm512_xor_si512, _mm256_xor_si256, Integers)
BINARY(_mm512_add_epi32, _mm256_add_epi32, Integers)
BINARY(_mm512_madd_epi16, _mm256_madd_epi16, Integers)
BINARY(_mm512_sub_epi32, _mm256_sub_epi32, Integers)
BINARY(_mm512_sub_epi16, _mm256_sub_epi16, Integers)
BINARY(_mm512_sub_epi8, _mm256_sub_epi8, Integers)
BINARY(_mm512_sllv_epi32, _mm256_sllv_epi32, Integers)
BINARY(_mm512_shuffle_epi8, _mm256_shuffle_epi8, Integers)
BINARY(_mm512_unpacklo_epi32, _mm256_unpacklo_epi32, Integers)
BINARY(_mm512_unpackhi_epi32, _mm256_unpackhi_epi32, Integers)
BINARY(_mm512_unpacklo_epi64, _mm256_unpacklo_epi64, Integers)
BINARY(_mm512_unpackhi_epi64, _mm256_unpackhi_epi64, Integers)
SHIFT(_mm512_slli_epi32, _mm256_slli_epi32)
SHIFT(_mm512_srai_epi32, _mm256_srai_epi32)
SHIFT(_mm512_slli_epi16, _mm256_slli_epi16)
SHIFT(_mm512_srli_epi16, _mm256_srli_epi16)
SHIFT(_mm512_srai_epi16, _mm256_srai_epi16)
#undef BINARY
#undef TERNARY
#undef SHIFT

inline Floats _mm512_set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats _mm512_setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Integers _mm512_set1_epi32(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Integers _mm512_set1_epi16(short x) { return {_mm256_set1_epi16(x), _mm256_set1_epi16(x)}; }
inline Integers _mm512_set1_epi8(char x) { return {_mm256_set1_epi8(x), _mm256_set1_epi8(x)}; }
inline Integers _mm512_setzero_si512() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Integers _mm512_broadcast_i32x4(__m128i x) {
  return {_mm256_broadcastsi128_si256(x), _mm256_broadcastsi128_si256(x)};
}

inline Floats _mm512_loadu_ps(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Floats _mm512_load_ps(const float* p) { return _mm512_loadu_ps(p); }
inline void _mm512_storeu_ps(float* p, Floats x) { _mm256_storeu_ps(p, x.low), _mm256_storeu_ps(p + 8, x.high); }
inline void _mm512_store_ps(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Integers _mm512_loadu_si512(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline Integers _mm512_load_si512(const void* p) { return _mm512_loadu_si512(p); }
inline void _mm512_storeu_si512(void* p, Integers x) {
  _mm256_storeu_si256((__m256i*)p, x.low), _mm256_storeu_si256((__m256i*)p + 1, x.high);
}
inline void _mm512_store_si512(void* p, Integers x) { _mm512_storeu_si512(p, x); }

inline Floats _mm512_castsi512_ps(Integers x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline Integers _mm512_castps_si512(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
inline __m256i _mm512_castsi512_si256(Integers x) { return x.low; }
inline __m256i _mm512_extracti64x4_epi64(Integers x, int half) { return half ? x.high : x.low; }
inline Floats _mm512_cvtepi32_ps(Integers x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline Integers _mm512_cvtps_epi32(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
inline Floats _mm512_cvtph_ps(__m256i x) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
inline Integers _mm512_cvtepu16_epi32(__m256i x) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
}
inline Integers _mm512_cvtepi8_epi16(__m256i x) {
  return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(x)), _mm256_cvtepi8_epi16(_mm256_extracti128_si256(x, 1))};
}
inline Integers _mm512_cvtepi8_epi32(__m128i x) {
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}
// The low bytes of 16 integers.
inline __m128i _mm512_cvtepi32_epi8(Integers x) {
  const __m256i byte = _mm256_set1_epi32(0xFF);
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(x.low, byte), _mm256_and_si256(x.high, byte));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
  return _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
}

// Round eight numbers to bf16, to the nearest and ties to even. The upper halves of the results are 0. NaN stays.
inline __m256i rounded_halves(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 broken = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_srli_epi32(_mm256_blendv_epi8(sum, quiet, _mm256_castps_si256(broken)), 16);
}
inline __m256i _mm512_cvtneps_pbh(Floats x) {
  const __m256i words = _mm256_packus_epi32(rounded_halves(x.low), rounded_halves(x.high));
  return _mm256_permute4x64_epi64(words, 0xD8);
}
inline Integers _mm512_cvtne2ps_pbh(Floats high, Floats low) { return {_mm512_cvtneps_pbh(low), _mm512_cvtneps_pbh(high)}; }
inline __m128i _mm_cvtneps_pbh(__m128 x) {
  const __m256i halves = rounded_halves(_mm256_castps128_ps256(x));
  return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_castsi256_si128(halves));
}

// The first numbers of pairs of bf16 numbers, or the second ones, which lie above.
inline __m256 half_of_pairs(__m256i pairs, bool second) {
  return _mm256_castsi256_ps(second ? _mm256_and_si256(pairs, _mm256_set1_epi32((int)0xFFFF0000)) : _mm256_slli_epi32(pairs, 16));
}

// Add a · b to a sum in its register. Left the choice, compilers move sums about until some are in memory.
inline void add_product(__m256& sum, __m256 a, __m256 b) { asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }

// sum + a · b of pairs of bf16 numbers.
inline __m256 of_pairs(__m256 sum, __m256i a, __m256i b) {
  const __m256 first = _mm256_fmadd_ps(half_of_pairs(a, false), half_of_pairs(b, false), sum);
  return _mm256_fmadd_ps(half_of_pairs(a, true), half_of_pairs(b, true), first);
}
inline Floats _mm512_dpbf16_ps(Floats sum, Integers a, Integers b) {
  return {of_pairs(sum.low, a.low, b.low), of_pairs(sum.high, a.high, b.high)};
}

// Have x computed here. Otherwise compilers put off the additions of an unrolled loop, and keep all that they add in memory.
inline void in_registers(Integers& x) { asm("" : "+x"(x.low), "+x"(x.high)); }

// Of lanes: masks are bits, the first lane's lowest.
inline __m256i chosen(unsigned mask) {  // 8 lanes of 32 bits
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)mask), bits), bits);
}
inline __m256i chosen_words(unsigned mask) {  // 16 lanes of 16 bits
  const __m256i bits = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, (short)32768);
  return _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16((short)mask), bits), bits);
}
inline Floats _mm512_mask_mov_ps(Floats other, __mmask16 mask, Floats x) {
  return {_mm256_blendv_ps(other.low, x.low, _mm256_castsi256_ps(chosen(mask))),
          _mm256_blendv_ps(other.high, x.high, _mm256_castsi256_ps(chosen(mask >> 8)))};
}
inline Integers _mm512_mask_mov_epi32(Integers other, __mmask16 mask, Integers x) {
  return {_mm256_blendv_epi8(other.low, x.low, chosen(mask)), _mm256_blendv_epi8(other.high, x.high, chosen(mask >> 8))};
}
inline Integers _mm512_mask_mov_epi16(Integers other, __mmask32 mask, Integers x) {
  return {_mm256_blendv_epi8(other.low, x.low, chosen_words(mask)),
          _mm256_blendv_epi8(other.high, x.high, chosen_words(mask >> 16))};
}
inline Floats _mm512_maskz_mov_ps(__mmask16 mask, Floats x) { return _mm512_mask_mov_ps(_mm512_setzero_ps(), mask, x); }
inline Floats _mm512_mask_add_ps(Floats other, __mmask16 mask, Floats a, Floats b) {
  return _mm512_mask_mov_ps(other, mask, _mm512_add_ps(a, b));
}
inline Floats _mm512_mask_mul_ps(Floats other, __mmask16 mask, Floats a, Floats b) {
  return _mm512_mask_mov_ps(other, mask, _mm512_mul_ps(a, b));
}
inline Floats _mm512_mask3_fmadd_ps(Floats a, Floats b, Floats c, __mmask16 mask) {
  return _mm512_mask_mov_ps(c, mask, _mm512_fmadd_ps(a, b, c));
}
inline Floats _mm512_maskz_loadu_ps(__mmask16 mask, const float* p) {
  return {_mm256_maskload_ps(p, chosen(mask)), _mm256_maskload_ps(p + 8, chosen(mask >> 8))};
}
inline Floats _mm512_mask_loadu_ps(Floats other, __mmask16 mask, const float* p) {
  return mask == 0xFFFF ? _mm512_loadu_ps(p) : _mm512_mask_mov_ps(other, mask, _mm512_maskz_loadu_ps(mask, p));
}
inline void _mm512_mask_storeu_ps(float* p, __mmask16 mask, Floats x) {
  _mm256_maskstore_ps(p, chosen(mask), x.low), _mm256_maskstore_ps(p + 8, chosen(mask >> 8), x.high);
}
// Masks of the next two are those of the first lanes, as lanes() makes them: a part of a line may not be readable.
inline __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* p) {
  if (mask == 0xFFFF) return _mm256_loadu_si256((const __m256i*)p);
  alignas(32) uint16_t lanes[16] = {};
  std::copy_n((const uint16_t*)p, __builtin_popcount(mask), lanes);
  return _mm256_load_si256((const __m256i*)lanes);
}
inline __m128i _mm_maskz_loadu_epi8(__mmask16 mask, const void* p) {
  if (mask == 0xFFFF) return _mm_loadu_si128((const __m128i*)p);
  alignas(16) uint8_t lanes[16] = {};
  std::copy_n((const uint8_t*)p, __builtin_popcount(mask), lanes);
  return _mm_load_si128((const __m128i*)lanes);
}
inline __mmask16 _mm_test_epi8_mask(__m128i a, __m128i b) {
  return (__mmask16)~_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_and_si128(a, b), _mm_setzero_si128()));
}

inline __mmask16 both_masks(__m256 low, __m256 high) {
  return (__mmask16)(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}
#define COMPARE(OPERATION) \
  case OPERATION: return both_masks(_mm256_cmp_ps(a.low, b.low, OPERATION), _mm256_cmp_ps(a.high, b.high, OPERATION));
inline __mmask16 _mm512_cmp_ps_mask(Floats a, Floats b, int operation) {
  switch (operation) {
    COMPARE(_CMP_LT_OQ)
    COMPARE(_CMP_LE_OQ)
    COMPARE(_CMP_GT_OQ)
    COMPARE(_CMP_EQ_OQ)
    COMPARE(_CMP_UNORD_Q)
  }
  __builtin_unreachable();
}
#undef COMPARE
inline unsigned word_mask(__m256i words) {  // a bit per word of ones
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(words, _mm256_setzero_si256()), 0xD8);
  return (unsigned)_mm_movemask_epi8(_mm256_castsi256_si128(bytes));
}
inline __mmask32 _mm512_cmpgt_epi16_mask(Integers a, Integers b) {
  return word_mask(_mm256_cmpgt_epi16(a.low, b.low)) | word_mask(_mm256_cmpgt_epi16(a.high, b.high)) << 16;
}
inline __mmask32 _mm512_cmpge_epu16_mask(Integers a, Integers b) {
  const auto half = [](__m256i x, __m256i y) { return word_mask(_mm256_cmpeq_epi16(_mm256_max_epu16(x, y), x)); };
  return half(a.low, b.low) | half(a.high, b.high) << 16;
}

inline Floats _mm512_abs_ps(Floats x) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  return {_mm256_and_ps(x.low, magnitude), _mm256_and_ps(x.high, magnitude)};
}
inline Floats _mm512_roundscale_ps(Floats x, int) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, NEAREST), _mm256_round_ps(x.high, NEAREST)};
}
// x · 2^whole in two steps, so that results are right up to the largest number. whole: -126 to 254.
inline __m256 scaled_half(__m256 x, __m256 whole) {
  const __m256i n = _mm256_cvtps_epi32(whole), first = _mm256_srai_epi32(n, 1), second = _mm256_sub_epi32(n, first);
  const auto power = [](__m256i e) {
    const __m256i bias = _mm256_set1_epi32(127);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_min_epi32(e, bias), bias), 23));
  };
  return _mm256_mul_ps(_mm256_mul_ps(x, power(first)), power(second));
}
inline Floats _mm512_scalef_ps(Floats x, Floats whole) {
  return {scaled_half(x.low, whole.low), scaled_half(x.high, whole.high)};
}
// a · b + c bit by bit: the one operation of three that is used.
inline Integers _mm512_ternarylogic_epi32(Integers a, Integers b, Integers c, int) {
  return {_mm256_or_si256(_mm256_and_si256(a.low, b.low), c.low), _mm256_or_si256(_mm256_and_si256(a.high, b.high), c.high)};
}
// Quarters 0 and 2 (0x88), or 1 and 3 (0xDD), of a, then of b.
inline Integers _mm512_shuffle_i32x4(Integers a, Integers b, int which) {
  const auto picked = [&](Integers x) {
    return which == 0x88 ? _mm256_permute2x128_si256(x.low, x.high, 0x20) : _mm256_permute2x128_si256(x.low, x.high, 0x31);
  };
  return {picked(a), picked(b)};
}
// Words 0 and 16, 1 and 17 ... of x: the only order that is used (blocks.h).
inline Integers _mm512_permutexvar_epi16(Integers, Integers x) {
  const __m256i even = _mm256_unpacklo_epi16(x.low, x.high), odd = _mm256_unpackhi_epi16(x.low, x.high);
  return {_mm256_permute2x128_si256(even, odd, 0x20), _mm256_permute2x128_si256(even, odd, 0x31)};
}

// 16 integers as 16-bit words. The second and third word of each four change places.
inline __m256i words_by_quads(Integers x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xD8);
  return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xD8), 0xD8);
}

inline float sum_of(__m256 x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float _mm512_reduce_add_ps(Floats x) { return sum_of(_mm256_add_ps(x.low, x.high)); }
inline float _mm512_reduce_max_ps(Floats x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

}  // namespace
