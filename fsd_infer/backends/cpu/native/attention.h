// Norms, rotary positions and attention of the queries that share keys and values.
#pragma once

#include "products.h"

#include <algorithm>
#include <type_traits>
#include <utility>

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

// Most queries that attend together; registers that 16 numbers take; registers for the sums of values and of weights.
#if defined(__AMX_BF16__)
constexpr int QUERIES = 16, EACH = 1, REGISTERS = 28;
#elif defined(__AVX512F__)
constexpr int QUERIES = 12, EACH = 1, REGISTERS = 28;
#else
constexpr int QUERIES = 6, EACH = 2, REGISTERS = 13;
#endif

constexpr int SLOTS = 2 * LANES;  // a thread computes scores of so many, or a multiple

// Queries that share keys and values.
struct Group {
  int count;
  const bf16* queries[QUERIES];
  const uint8_t* seen[QUERIES];  // seen[q][slot] is nonzero where q may attend
  bf16* out[QUERIES];
  const bf16 *keys, *values;     // of the first slot
  int64_t stride, slots;         // numbers between slots; slots, beyond which no query sees
};

// Call of(std::integral_constant<int, count>) for a count from 1 to QUERIES.
template <class Of, int... I>
inline void with_count(int count, Of of, std::integer_sequence<int, I...>) {
  ((I + 1 == count ? of(std::integral_constant<int, I + 1>{}) : void()), ...);
}
template <class Of>
inline void with_count(int count, Of of) {
  with_count(count, of, std::make_integer_sequence<int, QUERIES>{});
}

// The columns [begin, end), multiples of 16, of group.out[q] = Σ over slots of w · values[slot] / Σ w, with w =
// weights[slot · next + q · apart]. Slots are added in order. An invisible slot adds an exact 0, so a text gives the same bits
// wherever its slots lie among a tree's other nodes.
template <int Q>
__attribute__((noinline)) void weigh(const Group& group, const float* weights, int64_t next, int64_t apart, int64_t begin,
                                     int64_t end) {
  constexpr int AHEAD = 8;  // slots
  constexpr int PARTS = Q * (4 * EACH + 1) <= REGISTERS ? 4 : Q * (2 * EACH + 1) <= REGISTERS ? 2 : 1;
  float total[Q];
  const auto add_up = [&](auto parts, auto first, int64_t i) {
    constexpr int P = decltype(parts)::value;  // vectors of a value
    __m512 sum[P][Q];
    for (int q = 0; q < Q; ++q) {
      if (first) total[q] = 0;
      for (int part = 0; part < P; ++part) sum[part][q] = _mm512_setzero_ps();
    }
    for (int64_t slot = 0; slot < group.slots; ++slot) {
      const bf16* const value = group.values + slot * group.stride + i;
      fetch<_MM_HINT_T0>(value + AHEAD * group.stride, P * LANES * sizeof(bf16));
      __m512 numbers[P];
      for (int part = 0; part < P; ++part) numbers[part] = load(value + part * LANES);
      for (int q = 0; q < Q; ++q) {
        const float weight = weights[slot * next + q * apart];
        if (first) total[q] += weight;
        for (int part = 0; part < P; ++part)
          sum[part][q] = _mm512_fmadd_ps(_mm512_set1_ps(weight), numbers[part], sum[part][q]);
      }
    }
    for (int q = 0; q < Q; ++q) {
      if (first && total[q] < 1e-30f) total[q] = 1e-30f;  // keeps NaN
      for (int part = 0; part < P; ++part)
        store(group.out[q] + i + part * LANES, _mm512_div_ps(sum[part][q], _mm512_set1_ps(total[q])));
    }
  };
  constexpr auto all = std::integral_constant<int, PARTS>{};
  constexpr auto one = std::integral_constant<int, 1>{};
  int64_t i = begin;
  if (i + PARTS * LANES <= end) add_up(all, std::true_type{}, i), i += PARTS * LANES;
  else add_up(one, std::true_type{}, i), i += LANES;
  for (; i + PARTS * LANES <= end; i += PARTS * LANES) add_up(all, std::false_type{}, i);
  for (; i < end; i += LANES) add_up(one, std::false_type{}, i);
}

#ifdef __AMX_BF16__

// Write scores of the slots [begin, end) to `scores`, [slot][16]. Memory: block 16 · width / 2 pairs; rows 32 · width numbers.
// No score depends on the place of its slot or query.
void score(Multiplier& multiply, const Group& group, int64_t begin, int64_t end, int64_t width, float scale, int64_t,
           int32_t* block, bf16* rows, float* scores) {
  for (int q = 0; q < group.count; ++q) std::memcpy(rows + q * width, group.queries[q], width * sizeof(bf16));
  for (int64_t k = 0; k < width / 2; k += LANES)
    transpose((const int32_t*)rows + k, width / 2, group.count, block + k * LANES);
  int64_t common = end;  // the first slots, which every query sees
  for (int q = 0; q < group.count; ++q) {
    const void* const hidden = std::memchr(group.seen[q], 0, common);
    if (hidden) common = (const uint8_t*)hidden - group.seen[q];
  }
  for (int64_t at = begin; at < end; at += SLOTS) {
    const int64_t left = std::min<int64_t>(SLOTS, end - at);
    const bf16* from = group.keys + at * group.stride;
    int64_t apart = group.stride;
    if (left < SLOTS) {  // memory past the last slot may not be readable
      for (int64_t row = 0; row < left; ++row)
        std::memcpy(rows + row * width, from + row * apart, width * sizeof(bf16));
      std::memset(rows + left * width, 0, (SLOTS - left) * width * sizeof(bf16));
      from = rows;
      apart = width;
    }
    float* const own = scores + at * LANES;
    multiply.dots(from, from + LANES * apart, apart, block, width, own, own + LANES * LANES);
    for (int64_t slot = at; slot < at + left; ++slot) {
      __mmask16 visible = 0xFFFF;
      if (slot >= common)
        for (int q = 0; q < group.count; ++q)
          if (!group.seen[q][slot]) visible &= (__mmask16)~(1u << q);
      float* const found = scores + slot * LANES;
      _mm512_storeu_ps(found, _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), visible, _mm512_loadu_ps(found),
                                                 _mm512_set1_ps(scale)));
    }
  }
}

// Columns [begin, end) of a group's attention with these scores. Memory: weights as scores.
void attend(const Group& group, const float* scores, int64_t, int64_t begin, int64_t end, float* weights) {
  __m512 top = _mm512_set1_ps(-1e30f);  // finite if no slot is visible
  for (int64_t slot = 0; slot < group.slots; ++slot) top = _mm512_max_ps(_mm512_loadu_ps(scores + slot * LANES), top);
  for (int64_t slot = 0; slot < group.slots; ++slot)
    _mm512_storeu_ps(weights + slot * LANES, exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + slot * LANES), top)));
  with_count(group.count, [&](auto q) { weigh<q>(group, weights, LANES, 1, begin, end); });
}

#else

// `score` for Q queries.
template <int Q>
__attribute__((noinline)) void score_of(const Group& group, int64_t begin, int64_t end, int64_t width, float scale,
                                        int64_t padded, int32_t* block, float* scores) {
  constexpr int BLOCKS = EACH == 1 && Q <= 6 ? 2 : 1;  // of 16 slots at once, so that no sum waits for itself
  const int64_t pairs = width / 2;
  for (int64_t at = begin; at < end; at += BLOCKS * LANES) {
    for (int b = 0; b < BLOCKS; ++b) {
      const bf16* const from = group.keys + (at + b * LANES) * group.stride;
      const int64_t count = std::min<int64_t>(LANES, end - at - b * LANES);
      for (int64_t k = 0; k < pairs && count > 0; k += LANES)  // 16 keys side by side, as in a packed weight
        transpose((const int32_t*)from + k, group.stride / 2, count, block + (b * pairs + k) * LANES);
      for (int row = 0; row < LANES; ++row)
        fetch<_MM_HINT_T0>(from + (BLOCKS * LANES + row) * group.stride, width * sizeof(bf16));
    }
    __m512 sum[BLOCKS][Q];
    for (int b = 0; b < BLOCKS; ++b)
      for (int q = 0; q < Q; ++q) sum[b][q] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; ++k)
      for (int b = 0; b < BLOCKS; ++b) {
        const __m512bh key = (__m512bh)_mm512_loadu_si512(block + (b * pairs + k) * LANES);
        for (int q = 0; q < Q; ++q) {
          int32_t pair;
          std::memcpy(&pair, group.queries[q] + 2 * k, sizeof pair);
          sum[b][q] = _mm512_dpbf16_ps(sum[b][q], (__m512bh)_mm512_set1_epi32(pair), key);
        }
      }
    for (int b = 0; b < BLOCKS; ++b) {
      const int64_t first = at + b * LANES;
      if (first >= end) break;
      const __mmask16 inside = lanes(end - first);
      for (int q = 0; q < Q; ++q) {
        const __m128i bytes = _mm_maskz_loadu_epi8(inside, group.seen[q] + first);
        const __mmask16 visible = _mm_test_epi8_mask(bytes, bytes);
        _mm512_storeu_ps(scores + q * padded + first, _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), visible, sum[b][q],
                                                                         _mm512_set1_ps(scale)));
      }
    }
  }
}

// Write scores of the slots [begin, end) to `scores`, [Q][padded]. Memory: block 32 · width / 2 pairs. No score depends on the
// place of its slot or query.
void score(Multiplier&, const Group& group, int64_t begin, int64_t end, int64_t width, float scale, int64_t padded,
           int32_t* block, bf16*, float* scores) {
  with_count(group.count, [&](auto q) { score_of<q>(group, begin, end, width, scale, padded, block, scores); });
}

// Columns [begin, end) of a group's attention with these scores. Memory: weights as scores.
void attend(const Group& group, const float* scores, int64_t padded, int64_t begin, int64_t end, float* weights) {
  for (int q = 0; q < group.count; ++q, scores += padded) {
    __m512 highest = _mm512_set1_ps(-1e30f);  // finite if no slot is visible
    for (int64_t at = 0; at < group.slots; at += LANES) highest = _mm512_max_ps(_mm512_loadu_ps(scores + at), highest);
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
    for (int64_t at = 0; at < group.slots; at += LANES)
      _mm512_storeu_ps(weights + q * padded + at, exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + at), top)));
  }
  with_count(group.count, [&](auto q) { weigh<q>(group, weights, 1, padded, begin, end); });
}

#endif

}  // namespace
