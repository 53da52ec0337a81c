// Statistics of rows of logits: log-sum-exp, entropy, the largest, divergences.
#pragma once

#include "products.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace {

// ln(1 + t) for t in [0, 1]: 2 artanh(t / (2 + t)) by its series; relative error below 1e-7.
inline __m512 log_of_1_plus(__m512 t) {
  const __m512 s = _mm512_div_ps(t, _mm512_add_ps(t, _mm512_set1_ps(2.f))), square = _mm512_mul_ps(s, s);
  __m512 y = _mm512_set1_ps(1.f / 13.f);
  for (const float divisor : {11.f, 9.f, 7.f, 5.f, 3.f, 1.f})
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(1.f / divisor));
  return _mm512_mul_ps(_mm512_add_ps(s, s), y);
}

// ln Σ e^x over `count` numbers. `highest` is the largest of them, and finite.
template <class Number>
float log_sum_exp(const Number* x, int64_t count, float highest) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t at = 0; at < count; at += LANES) {
    const __mmask16 inside = lanes(count - at);
    const __m512 value = _mm512_sub_ps(load(x + at, inside), _mm512_set1_ps(highest));
    sum = _mm512_mask_add_ps(sum, inside, sum, exponential(value));
  }
  return highest + std::log(_mm512_reduce_add_ps(sum));
}

// Entropy of the softmax of `count` numbers. `highest` is the largest of them, and finite.
template <class Number>
float entropy(const Number* x, int64_t count, float highest) {
  __m512 sum = _mm512_setzero_ps(), moment = sum;
  for (int64_t at = 0; at < count; at += LANES) {
    const __mmask16 inside = lanes(count - at);
    // x must stay finite where e^x is 0
    const __m512 below = _mm512_sub_ps(load(x + at, inside), _mm512_set1_ps(highest));
    const __m512 value = _mm512_max_ps(below, _mm512_set1_ps(-100.f)), weight = exponential(value);
    sum = _mm512_mask_add_ps(sum, inside, sum, weight);
    moment = _mm512_mask3_fmadd_ps(weight, value, moment, inside);
  }
  const float total = _mm512_reduce_add_ps(sum);
  return std::log(total) - _mm512_reduce_add_ps(moment) / total;
}

// ln Σ e^x. NaN if the numbers are no logits of a distribution.
template <class Number>
float log_sum_exp(const Number* x, int64_t count) {
  __m512 top = _mm512_set1_ps(-INFINITY);
  for (int64_t at = 0; at < count; at += LANES) top = _mm512_max_ps(load(x + at, lanes(count - at)), top);
  return log_sum_exp(x, count, _mm512_reduce_max_ps(top));
}

// The largest number of a row and its first place. The number is NaN if the row has a NaN.
struct Maximum {
  float value;
  int64_t place;
};

constexpr int CHAINS = 2;  // independent chains of comparisons

// Compare 32 numbers at a time as integers, because signed magnitudes have the order of the numbers.
Maximum maximum(const bf16* x, int64_t columns) {
  constexpr int WIDE = 2 * LANES;
  const __m512i magnitude = _mm512_set1_epi16(0x7FFF), infinity = _mm512_set1_epi16(0x7F80);
  __m512i top[CHAINS], step[CHAINS];
  for (int chain = 0; chain < CHAINS; ++chain)
    top[chain] = _mm512_set1_epi16(INT16_MIN), step[chain] = _mm512_setzero_si512();
  __mmask32 broken = 0;
  int64_t at = 0;
  for (uint16_t now = 0; at + CHAINS * WIDE <= columns; at += CHAINS * WIDE, ++now) {
    for (int chain = 0; chain < CHAINS; ++chain) {
      const __m512i bits = _mm512_loadu_si512(x + at + chain * WIDE);
      const __m512i size = _mm512_and_si512(bits, magnitude), sign = _mm512_srai_epi16(bits, 15);
      const __m512i value = _mm512_sub_epi16(_mm512_xor_si512(size, sign), sign);
      const __mmask32 higher = _mm512_cmpgt_epi16_mask(value, top[chain]);
      broken |= _mm512_cmpgt_epi16_mask(size, infinity);
      top[chain] = _mm512_mask_mov_epi16(top[chain], higher, value);
      step[chain] = _mm512_mask_mov_epi16(step[chain], higher, _mm512_set1_epi16((int16_t)now));
    }
  }
  int most = std::numeric_limits<int>::min();
  Maximum found{0.f, 0};
  bool bad = broken != 0;
  const auto consider = [&](int value, int64_t place) {
    if (value > most || (value == most && place < found.place)) most = value, found.place = place;
  };
  for (int chain = 0; at && chain < CHAINS; ++chain) {
    int16_t values[WIDE];
    uint16_t steps[WIDE];
    _mm512_storeu_si512(values, top[chain]);
    _mm512_storeu_si512(steps, step[chain]);
    for (int lane = 0; lane < WIDE; ++lane)
      consider(values[lane], ((int64_t)steps[lane] * CHAINS + chain) * WIDE + lane);
  }
  for (; at < columns; ++at) {
    const int size = x[at] & 0x7FFF;
    bad |= size > 0x7F80;
    consider(x[at] & 0x8000 ? -size : size, at);
  }
  const uint32_t bits = (uint32_t)std::abs(most) << 16 | (most < 0 ? 0x80000000u : 0u);
  std::memcpy(&found.value, &bits, sizeof bits);
  if (bad) found.value = std::numeric_limits<float>::quiet_NaN();
  return found;
}

Maximum maximum(const float* x, int64_t columns) {
  __m512 top[CHAINS];
  __m512i step[CHAINS];
  for (int chain = 0; chain < CHAINS; ++chain)
    top[chain] = _mm512_set1_ps(-INFINITY), step[chain] = _mm512_setzero_si512();
  __mmask16 broken = 0;
  int64_t at = 0;
  for (int32_t now = 0; at + CHAINS * LANES <= columns; at += CHAINS * LANES, ++now) {
    for (int chain = 0; chain < CHAINS; ++chain) {
      const __m512 value = load(x + at + chain * LANES);
      const __mmask16 higher = _mm512_cmp_ps_mask(value, top[chain], _CMP_GT_OQ);
      broken |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
      top[chain] = _mm512_mask_mov_ps(top[chain], higher, value);
      step[chain] = _mm512_mask_mov_epi32(step[chain], higher, _mm512_set1_epi32(now));
    }
  }
  Maximum found{-INFINITY, 0};
  bool bad = broken != 0;
  const auto consider = [&](float value, int64_t place) {
    if (value > found.value || (value == found.value && place < found.place)) found = {value, place};
  };
  for (int chain = 0; at && chain < CHAINS; ++chain) {
    float values[LANES];
    int32_t steps[LANES];
    _mm512_storeu_ps(values, top[chain]);
    _mm512_storeu_si512(steps, step[chain]);
    for (int lane = 0; lane < LANES; ++lane)
      consider(values[lane], ((int64_t)steps[lane] * CHAINS + chain) * LANES + lane);
  }
  for (; at < columns; ++at) {
    bad |= x[at] != x[at];
    consider(x[at], at);
  }
  if (bad) found.value = std::numeric_limits<float>::quiet_NaN();
  return found;
}

enum Kind { KL_QP, KL_PQ, JS, AG, TV, RESIDUAL };  // the plain forms of divergence.py, and Σ (weight · p - q)+
constexpr float ZERO = -1e30f;             // log-probabilities at or below stand for probability 0
constexpr float LN2 = 0.693147181f;

// The divergence's terms of 16 tokens. a = ln p and b = ln q, both at least ZERO.
template <Kind KIND>
inline __m512 terms(__m512 a, __m512 b) {
  const __m512 p = exponential(a), q = exponential(b), gap = _mm512_sub_ps(b, a), none = _mm512_setzero_ps();
  const __mmask16 no_p = _mm512_cmp_ps_mask(a, _mm512_set1_ps(ZERO), _CMP_LE_OQ);
  const __mmask16 no_q = _mm512_cmp_ps_mask(b, _mm512_set1_ps(ZERO), _CMP_LE_OQ);
  const __m512 infinite = _mm512_set1_ps(INFINITY);
  if (KIND == TV) return _mm512_mul_ps(_mm512_set1_ps(.5f), _mm512_abs_ps(_mm512_sub_ps(p, q)));
  if (KIND == KL_QP) return _mm512_mask_mov_ps(_mm512_mul_ps(q, gap), no_p & ~no_q, infinite);
  if (KIND == KL_PQ) return _mm512_mask_mov_ps(_mm512_mul_ps(p, _mm512_sub_ps(none, gap)), no_q & ~no_p, infinite);
  // softplus(±gap) = max(±gap, 0) + ln(1 + e^-|gap|)
  const __m512 rest = log_of_1_plus(exponential(_mm512_sub_ps(none, _mm512_abs_ps(gap))));
  const __m512 up = _mm512_add_ps(_mm512_max_ps(gap, none), rest);
  const __m512 down = _mm512_add_ps(_mm512_max_ps(_mm512_sub_ps(none, gap), none), rest);
  const __m512 ln2 = _mm512_set1_ps(LN2);
  __m512 value;
  if (KIND == JS) {
    value = _mm512_mul_ps(p, _mm512_sub_ps(ln2, up));
    value = _mm512_mul_ps(_mm512_set1_ps(.5f), _mm512_fmadd_ps(q, _mm512_sub_ps(ln2, down), value));
  } else {
    value = _mm512_sub_ps(_mm512_add_ps(up, down), _mm512_add_ps(ln2, ln2));
    value = _mm512_mul_ps(_mm512_set1_ps(.25f), _mm512_mul_ps(_mm512_add_ps(p, q), value));
    value = _mm512_mask_mov_ps(value, (__mmask16)(no_p ^ no_q), infinite);
  }
  return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(gap, none, _CMP_EQ_OQ), none);  // exactly 0 where p = q
}

// D(p, q) of one row. ids are the tokens of q, null for all. For other tokens q is 0 and the term is linear in p.
template <Kind KIND, class P, class Q>
float divergence(const P* p, int64_t columns, const Q* q, int64_t drafted, const int64_t* ids, float weight) {
  const __m512 of_p = _mm512_set1_ps(log_sum_exp(p, columns)), of_q = _mm512_set1_ps(log_sum_exp(q, drafted));
  const __m512 floor = _mm512_set1_ps(ZERO);
  const __m512 none = _mm512_setzero_ps();
  __m512 sum = none, mass = none;
  for (int64_t at = 0; at < drafted; at += LANES) {
    const __mmask16 inside = lanes(drafted - at);
    __m512 own;
    if (ids) {
      alignas(64) P picked[LANES] = {};
      for (int64_t i = 0; i < std::min<int64_t>(LANES, drafted - at); ++i) picked[i] = p[ids[at + i]];
      own = load(picked, inside);
    } else {
      own = load(p + at, inside);
    }
    // this order of arguments keeps NaN
    const __m512 a = _mm512_max_ps(floor, _mm512_sub_ps(own, of_p));
    const __m512 b = _mm512_max_ps(floor, _mm512_sub_ps(load(q + at, inside), of_q));
    if constexpr (KIND == RESIDUAL) {
      const __m512 weighted = _mm512_mul_ps(_mm512_set1_ps(weight), exponential(a));
      sum = _mm512_add_ps(sum, _mm512_max_ps(none, _mm512_sub_ps(weighted, exponential(b))));
    } else {
      sum = _mm512_add_ps(sum, terms<KIND>(a, b));
    }
    if (ids) mass = _mm512_add_ps(mass, exponential(a));
  }
  float total = _mm512_reduce_add_ps(sum);
  const float outside = KIND == JS ? LN2 / 2 : KIND == RESIDUAL ? weight : .5f;  // of p without q
  if (ids && KIND != KL_QP) total += std::max(0.f, 1.f - _mm512_reduce_add_ps(mass)) * outside;
  const float high = KIND == JS ? LN2 : KIND == TV || KIND == RESIDUAL ? 1.f : INFINITY;
  return total != total ? total : std::min(std::max(total, 0.f), high);
}

inline float number(float x) { return x; }

inline float number(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Find the `most` largest of x [columns] and their places, in falling order, the first of equals first.
template <class Number>
void select_largest(const Number* x, int64_t columns, int64_t most, float* largest, int64_t* where) {
  int64_t held = 0;
  const auto consider = [&](int64_t at) {
    const float value = number(x[at]);
    int64_t place = held < most ? held++ : most - 1;
    for (; place > 0 && value > largest[place - 1]; --place) {
      largest[place] = largest[place - 1];
      where[place] = where[place - 1];
    }
    largest[place] = value;
    where[place] = at;
  };
  for (int64_t at = 0; at < most; ++at) consider(at);
  for (int64_t at = most; at < columns; at += LANES) {
    const __m512 values = load(x + at, lanes(columns - at));
    unsigned left = 0xFFFF;
    while (left &= _mm512_cmp_ps_mask(values, _mm512_set1_ps(largest[most - 1]), _CMP_GT_OQ)) {
      consider(at + __builtin_ctz(left));
      left &= left - 1;
    }
  }
}

// The same of logits x [columns], with ln q in place of the logits.
template <class Number>
void likeliest(const Number* x, int64_t columns, int64_t most, float* log_q, int64_t* where) {
  select_largest(x, columns, most, log_q, where);
  const float total = log_sum_exp(x, columns);
  for (int64_t i = 0; i < most; ++i) log_q[i] -= total;
}

// An index by inverse CDF, never one of weight 0; `columns` if all are 0. weights(at): of 16 columns, 0 beyond the last.
template <class Weights>
int64_t drawn(int64_t columns, float uniform, Weights weights) {
  constexpr int64_t BLOCK = 512;
  std::vector<double> sums;
  double total = 0;
  for (int64_t first = 0; first < columns; first += BLOCK) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t at = first; at < std::min(first + BLOCK, columns); at += LANES) sum = _mm512_add_ps(sum, weights(at));
    sums.push_back(total += _mm512_reduce_add_ps(sum));
  }
  if (!(total > 0)) return columns;
  const double wanted = std::min((double)uniform * total, std::nextafter(total, 0.0));
  const int64_t block = std::upper_bound(sums.begin(), sums.end(), wanted) - sums.begin();
  double sum = block ? sums[block - 1] : 0;
  int64_t found = columns;
  for (int64_t at = block * BLOCK; at < std::min((block + 1) * BLOCK, columns); at += LANES) {
    alignas(64) float own[LANES];
    _mm512_store_ps(own, weights(at));
    for (int64_t i = 0; i < LANES; ++i) {
      if (own[i] > 0) found = at + i;  // the last of them, should the sums differ by rounding
      if ((sum += own[i]) > wanted) return found;
    }
  }
  return found;
}

// Copy x [columns] to `to`; numbers below `least` become `other`.
void keep_from(const float* x, int64_t columns, float least, float other, float* to) {
  for (int64_t at = 0; at < columns; at += LANES) {
    const __mmask16 inside = lanes(columns - at);
    const __m512 values = load(x + at, inside);
    const __mmask16 below = _mm512_cmp_ps_mask(values, _mm512_set1_ps(least), _CMP_LT_OQ);
    _mm512_mask_storeu_ps(to + at, inside, _mm512_mask_mov_ps(values, below, _mm512_set1_ps(other)));
  }
}

// An index of the softmax of x; 0 if x is no logits of a distribution.
template <class Number>
int64_t sampled(const Number* x, int64_t columns, float uniform) {
  const float highest = maximum(x, columns).value;
  if (!std::isfinite(highest)) return 0;
  return drawn(columns, uniform, [&](int64_t at) {
    const __mmask16 inside = lanes(columns - at);
    return _mm512_maskz_mov_ps(inside, exponential(_mm512_sub_ps(load(x + at, inside), _mm512_set1_ps(highest))));
  });
}

// An index of (weight · softmax(p) - softmax(q))+ without refused ones, of which -1 is none; `columns` if p is no logits of
// a distribution, or nothing is left. q may be null; ids are its tokens, null for all.
template <class P, class Q>
int64_t drawn_rest(const P* p, int64_t columns, float weight, const Q* q, int64_t drafted, const int64_t* ids,
                   const int64_t* refused, int64_t most, float uniform) {
  const float highest = maximum(p, columns).value;
  if (!std::isfinite(highest)) return columns;
  std::vector<float> taken(q || most ? columns : 0);
  const auto take = [&](int64_t token, float mass) {
    if (token >= 0 && token < columns) taken[token] = mass;
  };
  const __m512 of_q = _mm512_set1_ps(q ? log_sum_exp(q, drafted) : 0.f);
  for (int64_t at = 0; q && at < drafted; at += LANES) {
    alignas(64) float own[LANES];
    _mm512_store_ps(own, exponential(_mm512_sub_ps(load(q + at, lanes(drafted - at)), of_q)));
    for (int64_t i = 0; i < std::min<int64_t>(LANES, drafted - at); ++i) take(ids ? ids[at + i] : at + i, own[i]);
  }
  for (int64_t i = 0; i < most; ++i) take(refused[i], INFINITY);
  const float total = q ? log_sum_exp(p, columns, highest) : highest;  // without q any multiple of p will do
  return drawn(columns, uniform, [&](int64_t at) {
    const __mmask16 inside = lanes(columns - at);
    __m512 mass = exponential(_mm512_sub_ps(load(p + at, inside), _mm512_set1_ps(total)));
    if (!taken.empty()) {
      const __m512 less = _mm512_maskz_loadu_ps(inside, taken.data() + at);
      mass = _mm512_max_ps(_mm512_setzero_ps(), _mm512_sub_ps(_mm512_mul_ps(_mm512_set1_ps(weight), mass), less));
    }
    return _mm512_maskz_mov_ps(inside, mass);
  });
}

// Rows of logits, `columns` each. pick: the numbers of the rows, null for all in order.
template <class Number>
struct Rows {
  const Number* numbers;
  int64_t columns;
  const int64_t* pick;
  const Number* operator[](int64_t row) const { return numbers + (pick ? pick[row] : row) * columns; }
};

template <Kind KIND, class P, class Q>
void divergences(Rows<P> p, Rows<Q> q, int64_t rows, const int64_t* ids, const float* weights, float* out) {
  // threads take turns, as rows with a q may come first
  for (int64_t row = omp_get_thread_num(); row < rows; row += omp_get_num_threads()) {
    const bool has_q = !q.pick || q.pick[row] >= 0;
    out[row] = has_q ? divergence<KIND>(p[row], p.columns, q[row], q.columns, ids, weights ? weights[row] : 1.f)
                     : KIND == RESIDUAL ? 0.f : INFINITY;
  }
}

template <class P, class Q>
void divergences(int kind, Rows<P> p, Rows<Q> q, int64_t rows, const int64_t* ids, const float* weights, float* out) {
  switch (kind) {
    case KL_QP: return divergences<KL_QP>(p, q, rows, ids, weights, out);
    case KL_PQ: return divergences<KL_PQ>(p, q, rows, ids, weights, out);
    case JS: return divergences<JS>(p, q, rows, ids, weights, out);
    case AG: return divergences<AG>(p, q, rows, ids, weights, out);
    case TV: return divergences<TV>(p, q, rows, ids, weights, out);
    default: return divergences<RESIDUAL>(p, q, rows, ids, weights, out);
  }
}

}  // namespace
