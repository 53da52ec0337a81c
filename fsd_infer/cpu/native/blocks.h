// Weights in ggml's block types: their layout in records of 16 columns, reading files, products of few rows.
#pragma once

#include "numbers.h"

#include <cstring>
#include <utility>
#include <vector>

namespace {

// The layout of a block type. A code q stands for d · (q - BIAS) + m; a run of RUN codes in a column shares d and m.
// Types with several runs per record hold one fp16 d and m, and multiply each by an integer per run.
template <int BITS_, int RUN_, int RUNS_, int BIAS_, bool LEAST_>
struct Form {
  static constexpr int BITS = BITS_, RUN = RUN_, RUNS = RUNS_, BIAS = BIAS_;
  static constexpr bool LEAST = LEAST_;                                // has m
  static constexpr int SPAN = RUN * RUNS;                              // codes per record
  static constexpr int STEP = 64 * BITS;                               // bytes of 32 x 16 codes
  static constexpr int CODES = SPAN / 32 * STEP;                       // bytes of a record's codes; integers per run, d and m follow
  static constexpr int PER_RUN = RUNS > 1 ? RUNS * LANES : 0;          // bytes of the integers per run, for d or for m
  static constexpr int FP16 = CODES + PER_RUN * (1 + LEAST);           // offset of d and m
  static constexpr int RECORD = FP16 + 2 * LANES * (1 + LEAST);
  static constexpr int SHIFT = BITS < 8 ? 128 : 0;                     // offset of a code as codes_of returns it
};

enum BlockKind : int { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };  // ggml's type numbers

// Call with(Form) for a block type. Returns false if there is no Form for it.
template <class With>
inline bool with_form(int64_t kind, With with) {
  switch (kind) {
    case Q4_0: return with(Form<4, 32, 1, 8, false>{}), true;
    case Q4_1: return with(Form<4, 32, 1, 0, true>{}), true;
    case Q5_0: return with(Form<5, 32, 1, 16, false>{}), true;
    case Q5_1: return with(Form<5, 32, 1, 0, true>{}), true;
    case Q8_0: return with(Form<8, 32, 1, 0, false>{}), true;
    case Q4_K: return with(Form<4, 32, 8, 0, true>{}), true;
    case Q5_K: return with(Form<5, 32, 8, 0, true>{}), true;
    case Q6_K: return with(Form<6, 16, 16, 32, false>{}), true;
    default: return false;
  }
}

// x [rows, depth] in the order in which block products read it. Rows form groups of at most TOGETHER. A group stores,
// for each 32 numbers of depth, those numbers of all its rows, then three sums per row: of all 32 and of each half.
constexpr int TOGETHER = 8;

class Interleaved {
  static constexpr int64_t EACH = 32 * sizeof(bf16) + 3 * sizeof(float);  // bytes per row and 32 numbers of depth
  std::vector<char> memory;
  int rows = 0;

 public:
  const bool many;          // many rows: panels are widened to bf16, and x is read in place
  std::vector<bf16> panel;  // one widened panel

  explicit Interleaved(bool many) : many(many) {}

  // Call with(first row, number of rows, address) for each group.
  template <class With>
  void groups(int64_t depth, With with) const {
    const int count = (rows + TOGETHER - 1) / TOGETHER;
    for (int group = 0, row = 0; group < count; ++group) {
      const int own = (rows - row + count - group - 1) / (count - group);
      with(row, own, memory.data() + row * (depth / 32) * EACH);
      row += own;
    }
  }

  void take(const bf16* x, int count, int64_t depth) {
    rows = count;
    memory.resize(rows * (depth / 32) * EACH);
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    groups(depth, [&](int first, int own, const char* start) {
      for (int64_t b = 0; b < depth / 32; ++b) {
        char* const numbers = (char*)start + b * own * EACH;
        for (int m = 0; m < own; ++m) {
          const __m512i some = _mm512_loadu_si512(x + (first + m) * depth + b * 32);
          _mm512_storeu_si512(numbers + m * 64, some);
          const __m512 pairs = _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)some, ones);
          const float low = _mm512_mask_reduce_add_ps(0x00FF, pairs), high = _mm512_mask_reduce_add_ps(0xFF00, pairs);
          const float sums[3] = {low + high, low, high};
          for (int i = 0; i < 3; ++i) std::memcpy(numbers + own * 64 + (i * own + m) * 4, sums + i, 4);
        }
      }
    });
  }
};

// Return pair `pair` of 32 numbers of depth for 16 columns: code + SHIFT, as bf16. Codes lie in 16-bit words, one per
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
        if (F::SHIFT == 0) continue;
        least = _mm512_fnmadd_ps(d, _mm512_set1_ps(F::SHIFT + F::BIAS), least);
        for (int m = 0; m < M; ++m) {
          float sum;
          std::memcpy(&sum, x + M * 64 + ((F::RUN == 32 ? 0 : 1 + run) * M + m) * 4, sizeof sum);
          total[m] = _mm512_fmadd_ps(least, _mm512_set1_ps(sum), total[m]);
        }
      }
      x += M * 76;
    }
  for (int m = 0; m < M; ++m) _mm512_storeu_ps(sums + m * LANES, total[m]);
}

// Write 16 columns in bf16, each number rounded once; pairs of depth are `stride` numbers apart.
template <class F>
void widen(const uint8_t* record, int64_t depth, bf16* to, int64_t stride) {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) order[i] = (uint16_t)(i / 2 + i % 2 * LANES);
  const __m512i pairs = _mm512_load_si512(order);
  const __m512 worth_none = _mm512_set1_ps(F::SHIFT + F::BIAS);
  for (int64_t end = depth / F::SPAN; end > 0; --end, record += F::RECORD)
    for (int part = 0; part < F::SPAN / 32; ++part)
      for (int pair = 0; pair < 16; ++pair, to += stride) {
        __m512 d, m;
        scales_of<F>(record, part * (32 / F::RUN) + pair * 2 / F::RUN, d, m);
        const __m512i codes = (__m512i)codes_of<F>(record + part * F::STEP, pair);
        const auto worth = [&](__m512i bits) {
          return _mm512_fmadd_ps(d, _mm512_sub_ps(_mm512_castsi512_ps(bits), worth_none), m);
        };
        const __m512 first = worth(_mm512_slli_epi32(codes, 16));
        const __m512 second = worth(_mm512_and_si512(codes, _mm512_set1_epi32((int)0xFFFF0000)));
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(second, first)));
      }
}

// The products of a block type by number of rows, and the depth and bytes of its records.
struct Tiles {
  void (*of[TOGETHER])(const char* x, int64_t depth, const uint8_t* record, float* sums);
  void (*widen)(const uint8_t* record, int64_t depth, bf16* to, int64_t stride);
  int64_t span, record;
};

template <class F, int... M>
Tiles tiles_for(std::integer_sequence<int, M...>) {
  return {{block_tile<M + 1, F>...}, widen<F>, F::SPAN, F::RECORD};
}

const Tiles& tiles_of(int64_t kind) {
  static const std::vector<Tiles> known = [] {
    std::vector<Tiles> made(Q6_K + 1);
    for (int64_t each = 0; each <= Q6_K; ++each)
      with_form(each, [&](auto form) { made[each] = tiles_for<decltype(form)>(std::make_integer_sequence<int, TOGETHER>{}); });
    return made;
  }();
  return known[kind];
}

// One block of a row of a file, unpacked.
struct Record {
  uint8_t codes[256], scales[16], least[16];  // scales and least: of types with several runs
  uint16_t d, m;
};

uint16_t halfword(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

// Unpack a block from a row. Returns its bytes.
int read_record(int64_t kind, const uint8_t* from, Record& to) {
  const uint8_t* p = from;
  if (kind != Q6_K) to.d = halfword(p), p += 2;
  to.m = 0;
  if (kind == Q4_1 || kind == Q5_1 || kind == Q4_K || kind == Q5_K) to.m = halfword(p), p += 2;
  if (kind == Q8_0) {
    std::memcpy(to.codes, p, 32);
    return 34;
  }
  if (kind == Q6_K) {  // 210 bytes
    for (int half = 0; half < 2; ++half)
      for (int l = 0; l < 128; ++l) {
        const int low = p[half * 64 + l % 64] >> (l / 64 * 4) & 15, high = p[128 + half * 32 + l % 32] >> (l / 32 * 2) & 3;
        to.codes[half * 128 + l] = (uint8_t)(low | high << 4);
      }
    std::memcpy(to.scales, p + 192, 16);
    to.d = halfword(p + 208);
    return 210;
  }
  if (kind == Q4_K || kind == Q5_K) {  // 144 or 176
    for (int run = 0; run < 4; ++run) {
      to.scales[run] = p[run] & 63, to.least[run] = p[run + 4] & 63;
      to.scales[run + 4] = (uint8_t)((p[run + 8] & 15) | p[run] >> 6 << 4);
      to.least[run + 4] = (uint8_t)(p[run + 8] >> 4 | p[run + 4] >> 6 << 4);
    }
    const uint8_t *const high = p + 12, *const low = high + (kind == Q5_K ? 32 : 0);
    for (int k = 0; k < 256; ++k) {
      to.codes[k] = low[k / 64 * 32 + k % 32] >> (k / 32 % 2 * 4) & 15;
      if (kind == Q5_K) to.codes[k] |= (uint8_t)((high[k % 32] >> (k / 32) & 1) << 4);
    }
    return kind == Q5_K ? 176 : 144;
  }
  uint32_t high = 0;
  if (kind == Q5_0 || kind == Q5_1) std::memcpy(&high, p, 4), p += 4;
  for (int k = 0; k < 32; ++k) to.codes[k] = (uint8_t)((p[k % 16] >> (k / 16 * 4) & 15) | (high >> k & 1) << 4);
  return (int)(p + 16 - from);
}

// The place of code k of one of a record's 16 columns.
template <class F>
struct Place {
  int64_t low, high;  // byte offsets in the record
  int low_bit, high_bit;
  Place(int k, int column) {
    const int pair = k % 32 / 2, lane = column * 2 + k % 2;
    constexpr int MORE = F::BITS > 4 && F::BITS < 8 ? F::BITS - 4 : 1, EACH = 16 / MORE;
    const int64_t step = k / 32 * F::STEP;
    if (F::BITS == 8) {
      low = high = step + pair * 32 + lane, low_bit = high_bit = 0;
      return;
    }
    low_bit = pair % 4 * 4, high_bit = pair % EACH * MORE;
    low = step + pair / 4 * 64 + lane * 2 + low_bit / 8, low_bit %= 8;
    high = step + 256 + pair / EACH * 64 + lane * 2 + high_bit / 8, high_bit %= 8;
  }
};

template <class F>
void put(const Record& from, int column, uint8_t* record) {
  for (int k = 0; k < F::SPAN; ++k) {
    const Place<F> at(k, column);
    record[at.low] |= (uint8_t)((F::BITS == 8 ? from.codes[k] : from.codes[k] & 15) << at.low_bit);
    if (F::BITS > 4 && F::BITS < 8) record[at.high] |= (uint8_t)(from.codes[k] >> 4 << at.high_bit);
  }
  for (int run = 0; F::RUNS > 1 && run < F::RUNS; ++run) {
    record[F::CODES + run * LANES + column] = from.scales[run];
    if (F::LEAST) record[F::CODES + F::PER_RUN + run * LANES + column] = from.least[run];
  }
  std::memcpy(record + F::FP16 + 2 * column, &from.d, 2);
  if (F::LEAST) std::memcpy(record + F::FP16 + 2 * (LANES + column), &from.m, 2);
}

// The values of one column of a record, in fp32, each rounded once.
template <class F>
void get(const uint8_t* record, int column, float* y) {
  alignas(64) float ds[LANES], ms[LANES];
  for (int k = 0; k < F::SPAN; ++k) {
    if (k % F::RUN == 0) {
      __m512 d, m;
      scales_of<F>(record, k / F::RUN, d, m);
      _mm512_store_ps(ds, d);
      _mm512_store_ps(ms, m);
    }
    const Place<F> at(k, column);
    int code = record[at.low];
    if (F::BITS == 8) code = (int8_t)code;
    else code = code >> at.low_bit & 15;
    if (F::BITS > 4 && F::BITS < 8) code |= (record[at.high] >> at.high_bit & ((1 << (F::BITS - 4)) - 1)) << 4;
    y[k] = ds[column] * (float)(code - F::BIAS) + ms[column];
  }
}

}  // namespace
