// bf16 and fp8 numbers in vectors of 512 bits.
#pragma once

#include <immintrin.h>

#ifndef __AVX512F__
#include "avx2.h"
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;
using fp8 = int8_t;  // see widened()
constexpr int LANES = 16;  // fp32 numbers in a vector

inline __m512 load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }

// Load the lanes in `inside`; the others are minus infinity.
inline __m512 load(const bf16* p, __mmask16 inside) {
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, p)), 16);
  return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), inside, _mm512_castsi512_ps(bits));
}

inline __m512 load(const float* p, __mmask16 inside) {
  return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), inside, p);
}

inline __mmask16 lanes(int64_t left) { return left < LANES ? (__mmask16)((1u << left) - 1) : (__mmask16)0xFFFF; }

inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline void store(bf16* p, __m512 x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }

inline void store(float* p, __m512 x) { _mm512_storeu_ps(p, x); }

inline bf16 rounded(float x) { return (bf16)_mm_cvtsi128_si32((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x))); }

// Load 32 numbers of a packed weight as bf16.
inline __m512i widened(const bf16* p) { return _mm512_loadu_si512(p); }

// An fp8 byte has a sign, three exponent bits e and four mantissa bits m: ±(1 + m / 16) · 2^(e - 7).
inline __m512i widened(const fp8* p) {
  const __m512i bits = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)), 3);
  constexpr int AND_OR = 0xEA;  // the sign has filled the bits above e: keep one, and make them 01111
  return _mm512_ternarylogic_epi32(bits, _mm512_set1_epi16((short)0x83FF), _mm512_set1_epi16(0x3C00), AND_OR);
}

// e^x = 2^n · 2^f with |f| <= 1/2, the second factor by a polynomial. Relative error below 2e-7; 0 below -87.
inline __m512 exponential(__m512 x) {
  const __m512 scaled = _mm512_mul_ps(_mm512_max_ps(_mm512_set1_ps(-87.f), x), _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(scaled, whole);
  __m512 y = _mm512_set1_ps(1.54035304e-4f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.33335581e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.61812911e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.55041087e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.40226507e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.93147181e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.f));
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(_mm512_scalef_ps(y, whole), tiny, _mm512_setzero_ps());
}

// Fetch memory that is needed soon, to the cache of the hint.
template <auto HINT>
inline void fetch(const void* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) _mm_prefetch((const char*)from + line, HINT);
}

// Finish all stores before the tile instructions that follow: GCC's do not say which memory they read.
inline void finish_stores(const void* address = nullptr) { asm volatile("" ::"r"(address) : "memory"); }

}  // namespace
