// Norms, rotary positions and attention of the queries that share keys and values.
#pragma once

#include "products.h"

#include <algorithm>

namespace {

// y = x / sqrt(mean(x²) + epsilon) · weight over `size` numbers, a multiple of 16.
inline void rms_norm(const bf16* x, const bf16* weight, float epsilon, int64_t size, bf16* y) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += LANES) squares = _mm512_fmadd_ps(load(x + i), load(x + i), squares);
  const float mean = _mm512_reduce_add_ps(squares) / (float)size;
  const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(mean + epsilon));
  for (int64_t i = 0; i < size; i += LANES)
    store(y + i, _mm512_mul_ps(_mm512_mul_ps(load(x + i), scale), load(weight + i)));
}

// Rotate one head: y = x · cos + (-second half, first half of x) · sin. y may be x.
inline void rotate(const bf16* x, const bf16* cosine, const bf16* sine, int64_t width, bf16* y) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const __m512 low = load(x + i), high = load(x + half + i);
    const __m512 turned = _mm512_fnmadd_ps(high, load(sine + i), _mm512_mul_ps(low, load(cosine + i)));
    const __m512 other = _mm512_fmadd_ps(low, load(sine + half + i), _mm512_mul_ps(high, load(cosine + half + i)));
    store(y + i, turned);
    store(y + half + i, other);
  }
}

// Transpose 16 rows of 16 pairs, `stride` pairs apart: block[pair * 16 + row]. Rows from `count` on become zeros.
inline void transpose(const int32_t* from, int64_t stride, int64_t count, int32_t* block) {
  __m512i a[LANES], b[LANES];
  for (int row = 0; row < LANES; ++row)
    a[row] = row < count ? _mm512_loadu_si512(from + row * stride) : _mm512_setzero_si512();
  for (int i = 0; i < LANES; i += 2) {  // by pairs of rows, by pairs of pairs, then by quarters of registers, twice
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  for (int i = 0; i < LANES; i += 8)
    for (int j = 0; j < 4; ++j) {
      b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
      b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 4; ++j)
    for (int k = 0; k < 2; ++k) {  // pairs j + 4 k of the quarters, and those 8 places on
      const __m512i low = b[j + 4 * k], high = b[j + 4 * k + 8];
      _mm512_storeu_si512(block + (j + 4 * k) * LANES, _mm512_shuffle_i32x4(low, high, 0x88));
      _mm512_storeu_si512(block + (j + 4 * k + 8) * LANES, _mm512_shuffle_i32x4(low, high, 0xdd));
    }
}

#ifdef __AMX_BF16__

constexpr int QUERIES = 16;  // most queries that attend together

// out[q] = Σ over slots of weights[slot][q] · values[slot] / totals[q].
template <int Q>
__attribute__((noinline)) void weigh(const float* weights, const bf16* values, int64_t stride, int64_t slots,
                                     int64_t width, const float* totals, bf16* const* out) {
  for (int64_t i = 0; i < width; i += LANES) {
    __m512 sum[Q];
    for (int q = 0; q < Q; ++q) sum[q] = _mm512_setzero_ps();
    for (int64_t slot = 0; slot < slots; ++slot) {
      const __m512 value = load(values + slot * stride + i);
      for (int q = 0; q < Q; ++q) sum[q] = _mm512_fmadd_ps(_mm512_set1_ps(weights[slot * LANES + q]), value, sum[q]);
    }
    for (int q = 0; q < Q; ++q) store(out[q] + i, _mm512_div_ps(sum[q], _mm512_set1_ps(totals[q])));
  }
}

// Attention of `count` queries, at most QUERIES, that share keys and values. seen[q][slot] is nonzero where q may attend.
// Memory: scores has 16 numbers per slot, slots rounded up to 32; block 16 · width / 2 pairs; rows 32 · width numbers.
// No score depends on the place of its slot or query.
void attend(Multiplier& multiply, int count, const bf16* const* queries, const bf16* keys, const bf16* values,
            int64_t stride, int64_t slots, int64_t width, float scale, const uint8_t* const* seen, float* scores,
            int32_t* block, bf16* rows, bf16* const* out) {
  for (int q = 0; q < count; ++q) std::memcpy(rows + q * width, queries[q], width * sizeof(bf16));
  for (int64_t k = 0; k < width / 2; k += LANES)
    transpose((const int32_t*)rows + k, width / 2, count, block + k * LANES);
  int64_t common = slots;  // the first slots, which every query sees
  for (int q = 0; q < count; ++q) {
    const void* const hidden = std::memchr(seen[q], 0, common);
    if (hidden) common = (const uint8_t*)hidden - seen[q];
  }
  __m512 highest = _mm512_set1_ps(-INFINITY);
  for (int64_t at = 0; at < slots; at += 2 * LANES) {
    const int64_t left = std::min<int64_t>(2 * LANES, slots - at);
    const bf16* from = keys + at * stride;
    int64_t apart = stride;
    if (left < 2 * LANES) {  // memory past the last slot may not be readable
      for (int64_t row = 0; row < left; ++row)
        std::memcpy(rows + row * width, from + row * stride, width * sizeof(bf16));
      std::memset(rows + left * width, 0, (2 * LANES - left) * width * sizeof(bf16));
      from = rows;
      apart = width;
    }
    float* const own = scores + at * LANES;
    multiply.dots(from, from + LANES * apart, apart, block, width, own, own + LANES * LANES);
    for (int64_t slot = at; slot < at + left; ++slot) {
      __mmask16 visible = 0xFFFF;
      if (slot >= common)
        for (int q = 0; q < count; ++q)
          if (!seen[q][slot]) visible &= (__mmask16)~(1u << q);
      float* const score = scores + slot * LANES;
      const __m512 scaled = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), visible, _mm512_loadu_ps(score),
                                               _mm512_set1_ps(scale));
      highest = _mm512_max_ps(highest, scaled);
      _mm512_storeu_ps(score, scaled);
    }
  }
  const __m512 top = _mm512_max_ps(_mm512_set1_ps(-1e30f), highest);  // finite if no slot is visible
  // Slots are added in order. An invisible slot adds an exact 0, so a text gives the same bits wherever its slots lie
  // among a tree's other nodes.
  __m512 total = _mm512_setzero_ps();
  for (int64_t slot = 0; slot < slots; ++slot) {
    const __m512 weight = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + slot * LANES), top));
    total = _mm512_add_ps(total, weight);
    _mm512_storeu_ps(scores + slot * LANES, weight);
  }
  alignas(64) float totals[LANES];
  _mm512_store_ps(totals, _mm512_max_ps(_mm512_set1_ps(1e-30f), total));  // keeps NaN
#define TOGETHER(Q) \
  case Q: return weigh<Q>(scores, values, stride, slots, width, totals, out);
  switch (count) {
    TOGETHER(1) TOGETHER(2) TOGETHER(3) TOGETHER(4) TOGETHER(5) TOGETHER(6) TOGETHER(7) TOGETHER(8)
    TOGETHER(9) TOGETHER(10) TOGETHER(11) TOGETHER(12) TOGETHER(13) TOGETHER(14) TOGETHER(15) TOGETHER(16)
  }
#undef TOGETHER
}

#else

#ifdef __AVX512F__
constexpr int QUERIES = 12;  // most queries that attend together
#else
constexpr int QUERIES = 6;
#endif

// Attention of Q queries that share keys and values. seen[q][slot] is nonzero where q may attend.
// Memory: scores has Q · padded floats, padded = slots rounded up to 16; block 16 · width / 2 pairs.
template <int Q>
__attribute__((noinline)) void attend(const bf16* const* queries, const bf16* keys, const bf16* values, int64_t stride,
                                      int64_t slots, int64_t width, float scale, const uint8_t* const* seen,
                                      float* scores, int32_t* block, bf16* const* out) {
  const int64_t padded = (slots + LANES - 1) / LANES * LANES, pairs = width / 2;
  const __m512 never = _mm512_set1_ps(-INFINITY);
  __m512 highest[Q];
  for (int q = 0; q < Q; ++q) highest[q] = never;
  for (int64_t at = 0; at < slots; at += LANES) {
    const int64_t count = std::min<int64_t>(LANES, slots - at);
    for (int64_t k = 0; k < pairs; k += LANES)  // 16 keys side by side, as in a packed weight
      transpose((const int32_t*)(keys + at * stride) + k, stride / 2, count, block + k * LANES);
    __m512 sum[Q];
    for (int q = 0; q < Q; ++q) sum[q] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; ++k) {
      const __m512bh key = (__m512bh)_mm512_loadu_si512(block + k * LANES);
      for (int q = 0; q < Q; ++q) {
        int32_t pair;
        std::memcpy(&pair, queries[q] + 2 * k, sizeof pair);
        sum[q] = _mm512_dpbf16_ps(sum[q], (__m512bh)_mm512_set1_epi32(pair), key);
      }
    }
    const __mmask16 inside = (__mmask16)((1u << count) - 1);
    for (int q = 0; q < Q; ++q) {
      const __m128i bytes = _mm_maskz_loadu_epi8(inside, seen[q] + at);
      const __mmask16 visible = _mm_test_epi8_mask(bytes, bytes);
      const __m512 score = _mm512_mask_mul_ps(never, visible, sum[q], _mm512_set1_ps(scale));
      highest[q] = _mm512_max_ps(highest[q], score);
      _mm512_storeu_ps(scores + q * padded + at, score);
    }
  }
  for (int q = 0; q < Q; ++q) {
    const __m512 top = _mm512_set1_ps(std::max(_mm512_reduce_max_ps(highest[q]), -1e30f));  // finite if no slot is visible
    for (int64_t at = 0; at < padded; at += LANES) {
      float* const own = scores + q * padded + at;
      _mm512_storeu_ps(own, exponential(_mm512_sub_ps(_mm512_loadu_ps(own), top)));
    }
  }
  // Slots are added in order. An invisible slot adds an exact 0, so a text gives the same bits wherever its slots lie
  // among a tree's other nodes.
  __m512 total[Q];
  for (int q = 0; q < Q; ++q) total[q] = _mm512_setzero_ps();
  for (int64_t slot = 0; slot < slots; ++slot)
    for (int q = 0; q < Q; ++q) total[q] = _mm512_add_ps(total[q], _mm512_set1_ps(scores[q * padded + slot]));
  for (int q = 0; q < Q; ++q) total[q] = _mm512_max_ps(_mm512_set1_ps(1e-30f), total[q]);  // keeps NaN
  for (int64_t i = 0; i < width; i += LANES) {
    __m512 sum[Q];
    for (int q = 0; q < Q; ++q) sum[q] = _mm512_setzero_ps();
    for (int64_t slot = 0; slot < slots; ++slot) {
      const __m512 value = load(values + slot * stride + i);
      for (int q = 0; q < Q; ++q)
        sum[q] = _mm512_fmadd_ps(_mm512_set1_ps(scores[q * padded + slot]), value, sum[q]);
    }
    for (int q = 0; q < Q; ++q) store(out[q] + i, _mm512_div_ps(sum[q], total[q]));
  }
}

void attend(Multiplier&, int count, const bf16* const* queries, const bf16* keys, const bf16* values, int64_t stride,
            int64_t slots, int64_t width, float scale, const uint8_t* const* seen, float* scores, int32_t* block, bf16*,
            bf16* const* out) {
#define TOGETHER(Q) \
  case Q: return attend<Q>(queries, keys, values, stride, slots, width, scale, seen, scores, block, out);
  switch (count) {
    TOGETHER(1) TOGETHER(2) TOGETHER(3) TOGETHER(4) TOGETHER(5) TOGETHER(6)
    TOGETHER(7) TOGETHER(8) TOGETHER(9) TOGETHER(10) TOGETHER(11) TOGETHER(12)
  }
#undef TOGETHER
}

#endif

}  // namespace
