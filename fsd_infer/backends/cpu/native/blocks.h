// Weights in ggml's block types: their layout in records of 16 columns, how codes are unpacked, and bf16 panels of them.
#pragma once

#include "numbers.h"

namespace {

// The layout of a block type. A code q stands for d · (q - BIAS) + m; a run of RUN codes in a column shares d and m.
// Types with several runs per record hold one fp16 d and m, and multiply each by an integer per run. In types with a table,
// a code stands for d · VALUES[q] / 8.
//
// Four numbers of depth are a quad. A quad's codes of 16 columns are 64 bytes, four per column. Codes of less than eight bits
// hold two quads in 64 bytes, one in the low nibbles and one in the high ones; planes of the higher bits follow.
template <int BITS_, int RUN_, int RUNS_, int BIAS_, bool LEAST_, bool TABLE_ = false>
struct Form {
  static constexpr int BITS = BITS_, RUN = RUN_, RUNS = RUNS_, BIAS = BIAS_;
  static constexpr bool TABLE = TABLE_;
  static constexpr bool LEAST = LEAST_;                                // has m
  static constexpr int SPAN = RUN * RUNS;                              // codes per record
  static constexpr int STEP = 64 * BITS;                               // bytes of 32 x 16 codes
  static constexpr int CODES = SPAN / 32 * STEP;                       // bytes of a record's codes; integers per run, d and m follow
  static constexpr int PER_RUN = RUNS > 1 ? RUNS * LANES : 0;          // bytes of the integers per run, for d or for m
  static constexpr int FP16 = CODES + PER_RUN * (1 + LEAST);           // offset of d and m
  static constexpr int RECORD = FP16 + 2 * LANES * (1 + LEAST);
  static constexpr int MORE = BITS > 4 && BITS < 8 ? BITS - 4 : 0;     // bits of a code in the planes
  static constexpr int PLANE = MORE ? 8 / MORE : 1;                    // quads per plane
  static constexpr bool SIGNED = BITS == 8 || TABLE;                   // codes, as quad_of returns them
  static constexpr int LIFT = SIGNED ? 128 : BIAS;                     // what raised() adds to a code less BIAS
  static constexpr bool JOINED = BITS == 4 && !TABLE;                  // 16 times a code fits a byte, see Step
  static constexpr int LOW = JOINED ? 4 : 7;                           // bits of the low byte of a number of x
  static constexpr int PIECE = JOINED ? RUN : 32;                      // numbers whose bytes lie together, see Step
};

enum BlockKind : int {  // ggml's type numbers
  Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ2_XXS = 16, KINDS
};

// What codes of IQ2_XXS stand for, in eighths: ±1, ±3.125 and ±5.375.
constexpr int8_t VALUES[LANES] = {8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43};

// Call with(Form) for a block type. Returns false if there is no Form for it.
template <class With>
inline bool with_form(int64_t kind, With with) {
  switch (kind) {
    case Q4_0: return with(Form<4, 32, 1, 8, false>{}), true;
    case Q4_1: return with(Form<4, 32, 1, 0, true>{}), true;
    case Q5_0: return with(Form<5, 32, 1, 16, false>{}), true;
    case Q5_1: return with(Form<5, 32, 1, 0, true>{}), true;
    case Q8_0: return with(Form<8, 32, 1, 0, false>{}), true;
    case Q2_K: return with(Form<4, 16, 16, 0, true>{}), true;
    case Q4_K: return with(Form<4, 32, 8, 0, true>{}), true;
    case Q5_K: return with(Form<5, 32, 8, 0, true>{}), true;
    case Q6_K: return with(Form<6, 16, 16, 32, false>{}), true;
    case IQ2_XXS: return with(Form<4, 32, 8, 0, false, true>{}), true;
    default: return false;
  }
}

// The codes of a quad for 16 columns: 64 bytes, unsigned and with BIAS, or signed if F::SIGNED. codes: of 32 numbers of depth.
template <class F>
inline __m512i quad_of(const uint8_t* codes, int quad) {
  if (F::BITS == 8) return _mm512_loadu_si512(codes + quad * 64);
  const __m512i both = _mm512_loadu_si512(codes + quad / 2 * 64);
  const __m512i low = _mm512_and_si512(quad % 2 ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
  if (F::TABLE) {
    const __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)VALUES));
    return _mm512_shuffle_epi8(values, low);
  }
  if (!F::MORE) return low;
  constexpr int AND_OR = 0xEA;
  const __m512i plane = _mm512_loadu_si512(codes + 256 + quad / F::PLANE * 64);
  const int at = quad % F::PLANE * F::MORE - 4;
  const __m512i moved = at > 0 ? _mm512_srli_epi16(plane, at) : _mm512_slli_epi16(plane, -at);
  return _mm512_ternarylogic_epi32(moved, _mm512_set1_epi8((char)(((1 << F::MORE) - 1) << 4)), low, AND_OR);
}

// Codes less BIAS, signed.
template <class F>
inline __m512i centred(__m512i quad) {
  return F::BIAS ? _mm512_sub_epi8(quad, _mm512_set1_epi8(F::BIAS)) : quad;
}

// Codes less BIAS, plus LIFT, unsigned.
template <class F>
inline __m512i raised(__m512i quad) {
  return F::SIGNED ? _mm512_xor_si512(quad, _mm512_set1_epi8((char)0x80)) : quad;
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
  if (F::TABLE) d = _mm512_mul_ps(d, _mm512_set1_ps(0.125f));
  if (F::LEAST) m = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), m), whole(1));
}

// Write 16 columns in bf16, each number rounded once; pairs of depth are `stride` numbers apart.
template <class F>
void widen(const uint8_t* record, int64_t depth, bf16* to, int64_t stride) {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) order[i] = (uint16_t)(i / 2 + i % 2 * LANES);
  const __m512i pairs = _mm512_load_si512(order);
  constexpr int RUNS = 32 / F::RUN, QUADS = F::RUN / 4;
  for (int64_t end = depth / F::SPAN; end > 0; --end, record += F::RECORD)
    for (int part = 0; part < F::SPAN / 32; ++part)
#pragma GCC unroll 2
      for (int run = 0; run < RUNS; ++run) {
        __m512 d, m;
        scales_of<F>(record, part * RUNS + run, d, m);  // once: for all that a compiler knows, stores may change them
#pragma GCC unroll 8
        for (int quad = run * QUADS; quad < (run + 1) * QUADS; ++quad) {
          const __m512i codes = centred<F>(quad_of<F>(record + part * F::STEP, quad));
          const auto worth = [&](int byte) {
            const __m512i code = _mm512_srai_epi32(_mm512_slli_epi32(codes, 24 - 8 * byte), 24);
            return _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(code), m);
          };
          for (int byte = 0; byte < 4; byte += 2, to += stride) {
            const __m512bh both = _mm512_cvtne2ps_pbh(worth(byte + 1), worth(byte));
            _mm512_storeu_si512(to, _mm512_permutexvar_epi16(pairs, (__m512i)both));
          }
        }
      }
}

}  // namespace
