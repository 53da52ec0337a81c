// Kernels for decoding in bf16 on CPUs with AVX512-BF16, over the few tokens of a draft or a verifying forward.
//
// Plain C interface for ctypes; compiled on the user's machine by kernels.py. bf16 values are passed as uint16_t.
// A weight W [N, K] lies as oneDNN packs it, in panels of output columns: [N / PANEL][K / 2][PANEL][2]. Where the CPU
// has AMX, panels are of 32 columns and products run on its tiles; elsewhere of 64, and on vectors. A weight may be
// of fp8 numbers in the same places, with a scale per column: half as much to read, and every one of them is a bf16.
// Or it is of ggml's blocks, in panels of 16 columns on every machine: see Form.
// Everything is computed in fp32 and rounded where it is stored: after norms, products, residuals and gates.

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

// A linear layer, [columns, depth].
struct fsd_linear {
  const void* panels;    // of the packed weight
  int64_t kind;          // of its blocks, as ggml numbers them; 0: no blocks
  const float* scales;   // [columns], by which the fp8 numbers of a column are multiplied; null: bf16
  const uint16_t* bias;  // [columns] or null
  int64_t columns, depth;
};

// A batch of draft trees of `count` nodes each, [trees, count]; proposers: null where all are 0.
struct fsd_tree {
  const int64_t *tokens, *parents;
  const float* scores;
  const int64_t* proposers;
  int64_t count;
};

namespace {

using bf16 = uint16_t;
using fp8 = int8_t;  // see widened()
#ifdef __AMX_BF16__
constexpr int64_t PANEL = 32;  // output columns side by side in a packed weight
constexpr int MOST = 32;       // rows of a product whose sums, with x and weights, fit eight tiles
#else
constexpr int64_t PANEL = 64;
constexpr int MOST = 6;        // the same for 32 registers
#endif
constexpr int LANES = 16;      // fp32 numbers in a vector
constexpr int V = PANEL / LANES;

inline __m512 load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }

// The numbers whose lane is in `inside`, elsewhere minus infinity.
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

// 32 numbers of a packed weight, as bf16.
inline __m512i widened(const bf16* p) { return _mm512_loadu_si512(p); }

// The byte's sign, three bits of exponent and four of the mantissa in their places: ±(1 + m / 16) · 2^(e - 7).
inline __m512i widened(const fp8* p) {
  const __m512i bits = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)), 3);
  constexpr int AND_OR = 0xEA;  // the sign has filled the bits above e: keep one, and make them 01111
  return _mm512_ternarylogic_epi32(bits, _mm512_set1_epi16((short)0x83FF), _mm512_set1_epi16(0x3C00), AND_OR);
}

// e^x: 2^n by the exponent's bits times a polynomial of 2^f, |f| <= 1/2; relative error below 2e-7; 0 below -87.
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

// Weights in blocks, as quantised files have them: a code q is worth d · (q - BIAS) + m, and d and m are of a run of
// depth within a column. Kinds with many runs have one d and one m of fp16 for all of them, and whole numbers per run.
template <int BITS_, int RUN_, int RUNS_, int BIAS_, bool LEAST_>
struct Form {
  static constexpr int BITS = BITS_, RUN = RUN_, RUNS = RUNS_, BIAS = BIAS_;
  static constexpr bool LEAST = LEAST_;                                // does it have m
  static constexpr int SPAN = RUN * RUNS;                              // depth of a record
  static constexpr int STEP = 64 * BITS;                               // bytes of the codes of 32 x 16 numbers
  static constexpr int CODES = SPAN / 32 * STEP;                       // of a record: codes, numbers per run, d, m
  static constexpr int PER_RUN = RUNS > 1 ? RUNS * LANES : 0;          // bytes of the runs' numbers, of d or m
  static constexpr int FP16 = CODES + PER_RUN * (1 + LEAST);           // where d and m lie
  static constexpr int RECORD = FP16 + 2 * LANES * (1 + LEAST);
  static constexpr int SHIFT = BITS < 8 ? 128 : 0;                     // of a code as it is looked up, see codes_of
};

enum BlockKind : int { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };  // ggml's numbers

// Calls with(form, bytes of a record's depth in a row of the file); false for kinds without a form.
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

// x [rows, depth] as products with blocks read it: groups of at most TOGETHER rows, in each by 32 numbers of depth,
// those of all its rows and then their sums, of all 32 and of either half.
constexpr int TOGETHER = 8;

class Interleaved {
  static constexpr int64_t EACH = 32 * sizeof(bf16) + 3 * sizeof(float);  // bytes per row and 32 numbers
  std::vector<char> memory;
  int rows = 0;

 public:
  const bool many;          // of the rows: panels are widened to bf16, and x is read as it is
  std::vector<bf16> panel;  // room for one of them

  explicit Interleaved(bool many) : many(many) {}

  // Calls with(first row, how many, where they lie) for every group.
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

// Codes of two numbers of depth of 16 columns, the `pair`-th of 32 numbers: as bf16, SHIFT above what they are worth.
// They lie in words of 16 bits, one per column and number of a pair: nibbles of four pairs, then planes of what is above.
// 0x4300 | code is 128 + code, exactly.
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
    constexpr int MORE = F::BITS > 4 ? F::BITS - 4 : 1, EACH = 16 / MORE;  // pairs in a word of a plane
    const __m512i plane = _mm512_loadu_si512(codes + 256 + pair / EACH * 64);
    const int at = pair % EACH * MORE - 4;
    const __m512i moved = at > 0 ? _mm512_srli_epi16(plane, at) : _mm512_slli_epi16(plane, -at);
    found = _mm512_ternarylogic_epi32(moved, _mm512_set1_epi16(((1 << MORE) - 1) << 4), found, AND_OR);
  }
  return (__m512bh)found;
}

// d and m of 16 columns in one run of a record.
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

// sums [M, 16] = x Wt for M interleaved rows and 16 columns. Within a run the codes' products are added up as they
// are, and d and m come in once per run. The order of additions is the same for every M.
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

// 16 columns in bf16, each number rounded once, `stride` numbers apart for every two of depth.
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

// The products of a kind: by rows, and how much depth and memory a record has.
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

// Panel `p` of a weight in blocks, as a packed one.
const bf16* widened(Interleaved& x, const fsd_linear& layer, int64_t p) {
  const Tiles& tiles = tiles_of(layer.kind);
  const int64_t size = layer.depth / tiles.span * tiles.record;
  x.panel.resize(layer.depth * PANEL);
  for (int v = 0; v < V; ++v)
    tiles.widen((const uint8_t*)layer.panels + (p * V + v) * size, layer.depth, x.panel.data() + v * 2 * LANES, 2 * PANEL);
  return x.panel.data();
}

// As panel_product below, of a weight in blocks; x was taken before.
template <class Done>
inline void block_panel_product(const Interleaved& x, const fsd_linear& layer, int64_t p, Done done) {
  const Tiles& tiles = tiles_of(layer.kind);
  const int64_t size = layer.depth / tiles.span * tiles.record;
  const uint8_t* panel = (const uint8_t*)layer.panels + p * V * size;
  for (int v = 0; v < V; ++v, panel += size)
    x.groups(layer.depth, [&](int first, int count, const char* rows) {
      alignas(64) float sums[TOGETHER * LANES];
      tiles.of[count - 1](rows, layer.depth, panel, sums);
      for (int m = 0; m < count; ++m) done(first + m, v * LANES, _mm512_load_ps(sums + m * LANES));
    });
}

// Products of at most MOST rows with one panel. While a panel is read, part `part` of `parts` of the next one is
// fetched: later groups of rows find their panel in the cache and would leave the memory idle.
#ifdef __AMX_BF16__

// This thread's tiles: sums of rows 0-15 and 16-31 with either half of a panel, those rows of x, the halves.
class Multiplier : public Interleaved {
  using Interleaved::Interleaved;
  int rows = 0;  // that the tiles are shaped for

  struct alignas(64) Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  };

  void shape(int count) {
    const uint8_t low = (uint8_t)std::min(count, LANES), high = (uint8_t)std::max(count - LANES, 1);
    Shape tiles;
    const uint8_t heights[8] = {low, low, high, high, low, high, LANES, LANES};
    std::memcpy(tiles.rows, heights, sizeof heights);
    _tile_loadconfig(&tiles);
    rows = count;
  }

 public:
  ~Multiplier() {
    if (rows) _tile_release();
  }

  // dots [2 · 16, 16] of two runs of 16 rows, `stride` numbers apart, with 16 columns [depth / 2][16][2].
  void dots(const bf16* low, const bf16* high, int64_t stride, const int32_t* columns, int64_t depth, float* low_dots,
            float* high_dots) {
    if (rows != MOST) shape(MOST);
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < depth / (2 * LANES); ++k) {
      _tile_loadd(6, columns + k * LANES * LANES, LANES * 4);
      _tile_loadd(4, low + k * 2 * LANES, stride * 2);
      _tile_loadd(5, high + k * 2 * LANES, stride * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
    }
    _tile_stored(0, low_dots, LANES * 4);
    _tile_stored(1, high_dots, LANES * 4);
  }

  template <class Number>
  void operator()(int count, const bf16* x, int64_t depth, const Number* panel, const Number* next, int part, int parts,
                  float* sums) {
    if (count != rows) shape(count);
    constexpr int64_t STEP = 2 * LANES * PANEL;  // numbers of a panel that a step reads, of 2 * LANES columns of x
    constexpr int LINE = 64 / sizeof(Number), LINES = STEP / LINE;
    constexpr bool NARROW = sizeof(Number) < sizeof(bf16);
    // Tiles are loaded from memory only: a step ahead, so that what is stored has arrived.
    alignas(64) bf16 wide[2][NARROW ? STEP : 1];
    const auto widen = [&](int64_t k) {
      for (int64_t i = 0; i < STEP; i += 2 * LANES)
        _mm512_store_si512(wide[k % 2] + i, widened(panel + k * STEP + i));
    };
    const int64_t steps = depth / (2 * LANES);
    const int first = LINES * part / parts, last = LINES * (part + 1) / parts;
    const bf16* const below = x + LANES * depth;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (NARROW) widen(0);
    for (int64_t k = 0; k < steps; ++k) {
      for (int line = first; line < last; ++line)
        _mm_prefetch((const char*)(next + k * STEP + line * LINE), _MM_HINT_T1);
      if (NARROW && k + 1 < steps) widen(k + 1);
      const void* const from = NARROW ? (const void*)wide[k % 2] : panel + k * STEP;
      _tile_loadd(6, from, PANEL * 4);
      _tile_loadd(7, (const bf16*)from + 2 * LANES, PANEL * 4);
      _tile_loadd(4, x + k * 2 * LANES, depth * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (count > LANES) {
        _tile_loadd(5, below + k * 2 * LANES, depth * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + LANES, PANEL * 4);
    if (count > LANES) {
      _tile_stored(2, sums + LANES * PANEL, PANEL * 4);
      _tile_stored(3, sums + LANES * PANEL + LANES, PANEL * 4);
    }
  }
};

#else

// sums [M, PANEL] = x Wt for M rows and one panel, in registers. Meanwhile, `lines`, at most two, of the cache lines that
// a step reads are fetched of what comes next: later groups of rows find their panel in the cache and would leave the
// memory idle. Not inlined: within a larger function, compilers keep the sums in memory.
template <int M, class Number>
__attribute__((noinline)) void tile(const bf16* x, int64_t depth, const Number* panel, const Number* next, int lines,
                                    float* sums) {
  __m512 sum[M][V];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) sum[m][v] = _mm512_setzero_ps();
  for (int64_t k = 0; k < depth / 2; ++k) {
    __m512bh w[V];
    for (int v = 0; v < V; ++v) w[v] = (__m512bh)widened(panel + k * 2 * PANEL + v * 2 * LANES);
    if (lines > 0) _mm_prefetch((const char*)(next + k * 2 * PANEL), _MM_HINT_T1);
    if (lines > 1) _mm_prefetch((const char*)(next + k * 2 * PANEL) + 64, _MM_HINT_T1);
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, x + m * depth + 2 * k, sizeof pair);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int v = 0; v < V; ++v) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], both, w[v]);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(sums + m * PANEL + v * LANES, sum[m][v]);
}

class Multiplier : public Interleaved {
 public:
  using Interleaved::Interleaved;

  template <class Number>
  void operator()(int count, const bf16* x, int64_t depth, const Number* panel, const Number* next, int part, int parts,
                  float* sums) const {
    constexpr int LINE = 64 / sizeof(Number), LINES = 2 * PANEL / LINE;
    const int first = LINES * part / parts, lines = parts == 1 ? 0 : LINES * (part + 1) / parts - first;
    next += first * LINE;
    switch (count) {
      case 1: return tile<1>(x, depth, panel, next, lines, sums);
      case 2: return tile<2>(x, depth, panel, next, lines, sums);
      case 3: return tile<3>(x, depth, panel, next, lines, sums);
      case 4: return tile<4>(x, depth, panel, next, lines, sums);
      case 5: return tile<5>(x, depth, panel, next, lines, sums);
      default: return tile<6>(x, depth, panel, next, lines, sums);
    }
  }
};

#endif

// One panel for any number of rows, in groups of equal size or nearly so; calls done(row, column, 16 sums).
template <class Number, class Done>
inline void panel_product(Multiplier& multiply, const bf16* x, int rows, int64_t depth, const Number* panel,
                          Done done) {
  const int groups = (rows + MOST - 1) / MOST;
  for (int group = 0, row = 0; group < groups; ++group) {
    const int count = (rows - row + groups - group - 1) / (groups - group);
    alignas(64) float sums[MOST * PANEL];
    multiply(count, x + row * depth, depth, panel, panel + depth * PANEL, group, groups, sums);
    for (int m = 0; m < count; ++m)
      for (int v = 0; v < V; ++v) done(row + m, v * LANES, _mm512_loadu_ps(sums + m * PANEL + v * LANES));
    row += count;
  }
}

// Rows that panel_product is called for next, if one of the layers needs them interleaved.
inline void take(Multiplier& multiply, const bf16* x, int rows, std::initializer_list<const fsd_linear*> layers) {
  for (const fsd_linear* layer : layers)
    if (layer->kind && !multiply.many) return multiply.take(x, rows, layer->depth);
}

// Panel `p` of a linear layer, bias included; calls done(row, column within the panel, 16 sums).
template <class Done>
inline void panel_product(Multiplier& multiply, const bf16* x, int rows, const fsd_linear& layer, int64_t p, Done done) {
  const int64_t start = p * PANEL * layer.depth;
  const bf16* const bias = layer.bias ? layer.bias + p * PANEL : nullptr;
  const float* const scales = layer.scales ? layer.scales + p * PANEL : nullptr;
  const auto finished = [&](int row, int at, __m512 sum) {
    if (scales) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(scales + at));
    if (bias) sum = _mm512_add_ps(sum, load(bias + at));
    done(row, at, sum);
  };
  if (layer.kind && multiply.many) panel_product(multiply, x, rows, layer.depth, widened(multiply, layer, p), finished);
  else if (layer.kind) block_panel_product(multiply, layer, p, finished);
  else if (scales) panel_product(multiply, x, rows, layer.depth, (const fp8*)layer.panels + start, finished);
  else panel_product(multiply, x, rows, layer.depth, (const bf16*)layer.panels + start, finished);
}

struct Share {  // of a thread: units [begin, end)
  int64_t begin, end;
  explicit Share(int64_t units) {
    const int64_t count = omp_get_num_threads(), own = omp_get_thread_num();
    begin = units * own / count, end = units * (own + 1) / count;
  }
};

// This thread's columns of the outputs of x [rows, depth], of one linear layer or of several side by side; calls
// done(row, column, 16 sums).
template <class Done>
inline void product(Multiplier& multiply, const bf16* x, int rows, std::initializer_list<const fsd_linear*> layers,
                    Done done) {
  int64_t panels = 0, before = 0;
  take(multiply, x, rows, layers);
  for (const fsd_linear* layer : layers) panels += layer->columns / PANEL;
  const Share share(panels);
  for (const fsd_linear* layer : layers) {
    const int64_t own = layer->columns / PANEL;
    for (int64_t p = std::max(share.begin, before); p < std::min(share.end, before + own); ++p)
      panel_product(multiply, x, rows, *layer, p - before,
                    [&](int row, int at, __m512 sum) { done(row, p * PANEL + at, sum); });
    before += own;
  }
}

// y = x / sqrt(mean(x²) + epsilon) · weight over `size` numbers, a multiple of 16.
inline void rms_norm(const bf16* x, const bf16* weight, float epsilon, int64_t size, bf16* y) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += LANES) squares = _mm512_fmadd_ps(load(x + i), load(x + i), squares);
  const float mean = _mm512_reduce_add_ps(squares) / (float)size;
  const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(mean + epsilon));
  for (int64_t i = 0; i < size; i += LANES)
    store(y + i, _mm512_mul_ps(_mm512_mul_ps(load(x + i), scale), load(weight + i)));
}

// One head turned by its position's angles: x · cos + (-second half, first half of x) · sin, in place or to y.
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

// 16 rows of 16 pairs, `stride` pairs apart, to 16 columns side by side: block[pair * 16 + row]; rows from `count` on
// are made of zeros.
inline void transpose(const int32_t* from, int64_t stride, int64_t count, int32_t* block) {
  __m512i a[LANES], b[LANES];
  for (int row = 0; row < LANES; ++row)
    a[row] = row < count ? _mm512_loadu_si512(from + row * stride) : _mm512_setzero_si512();
  for (int i = 0; i < LANES; i += 2) {  // pairs of rows, then of pairs, then quarters of registers twice
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
    for (int k = 0; k < 2; ++k) {  // pairs j + 4 k of the quarters, and those 8 further
      const __m512i low = b[j + 4 * k], high = b[j + 4 * k + 8];
      _mm512_storeu_si512(block + (j + 4 * k) * LANES, _mm512_shuffle_i32x4(low, high, 0x88));
      _mm512_storeu_si512(block + (j + 4 * k + 8) * LANES, _mm512_shuffle_i32x4(low, high, 0xdd));
    }
}

#ifdef __AMX_BF16__

constexpr int QUERIES = 16;  // that attend together at most

// out[q] = sum over slots of weights [slots][16] · values, divided by the totals.
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

// `count` queries, at most QUERIES, that share keys and values. seen[q]: bytes, nonzero where the query may attend.
// scores: room for 16 numbers per slot, slots rounded up to 32; block: room for 16 · width / 2 pairs; rows: room for
// 32 · width numbers. Keys are read as they lie, queries side by side: no score depends on where its slot or query is.
void attend(Multiplier& multiply, int count, const bf16* const* queries, const bf16* keys, const bf16* values,
            int64_t stride, int64_t slots, int64_t width, float scale, const uint8_t* const* seen, float* scores,
            int32_t* block, bf16* rows, bf16* const* out) {
  for (int q = 0; q < count; ++q) std::memcpy(rows + q * width, queries[q], width * sizeof(bf16));
  for (int64_t k = 0; k < width / 2; k += LANES)
    transpose((const int32_t*)rows + k, width / 2, count, block + k * LANES);
  int64_t common = slots;  // so many slots at the beginning are seen by all
  for (int q = 0; q < count; ++q) {
    const void* const hidden = std::memchr(seen[q], 0, common);
    if (hidden) common = (const uint8_t*)hidden - seen[q];
  }
  __m512 highest = _mm512_set1_ps(-INFINITY);
  for (int64_t at = 0; at < slots; at += 2 * LANES) {
    const int64_t left = std::min<int64_t>(2 * LANES, slots - at);
    const bf16* from = keys + at * stride;
    int64_t apart = stride;
    if (left < 2 * LANES) {  // what lies behind the last slot may not be ours to read
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
  const __m512 top = _mm512_max_ps(_mm512_set1_ps(-1e30f), highest);  // none visible: not NaN
  // One slot after the other: slots that are not visible add an exact 0, so the same texts give the same bits wherever
  // they lie among a tree's other nodes.
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

constexpr int QUERIES = 12;  // that attend together at most

// Q queries that share keys and values. seen[q]: bytes, nonzero where the query may attend. scores: room for
// Q · padded floats, padded = slots rounded up to 16; block: room for 16 · width / 2 pairs.
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
    for (int64_t k = 0; k < pairs; k += LANES)  // 16 keys side by side, as a packed weight
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
    const __m512 top = _mm512_set1_ps(std::max(_mm512_reduce_max_ps(highest[q]), -1e30f));  // none visible: not NaN
    for (int64_t at = 0; at < padded; at += LANES) {
      float* const own = scores + q * padded + at;
      _mm512_storeu_ps(own, exponential(_mm512_sub_ps(_mm512_loadu_ps(own), top)));
    }
  }
  // One slot after the other: slots that are not visible add an exact 0, so the same texts give the same bits wherever
  // they lie among a tree's other nodes.
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

// ln(1 + t) for t in [0, 1]: 2 artanh(t / (2 + t)) by its series; relative error below 1e-7.
inline __m512 log_of_1_plus(__m512 t) {
  const __m512 s = _mm512_div_ps(t, _mm512_add_ps(t, _mm512_set1_ps(2.f))), square = _mm512_mul_ps(s, s);
  __m512 y = _mm512_set1_ps(1.f / 13.f);
  for (const float divisor : {11.f, 9.f, 7.f, 5.f, 3.f, 1.f})
    y = _mm512_fmadd_ps(y, square, _mm512_set1_ps(1.f / divisor));
  return _mm512_mul_ps(_mm512_add_ps(s, s), y);
}

// ln of the sum of e^x over `count` numbers, of which `highest`, finite, is the largest.
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

// Entropy of the softmax of `count` numbers, of which `highest`, finite, is the largest.
template <class Number>
float entropy(const Number* x, int64_t count, float highest) {
  __m512 sum = _mm512_setzero_ps(), moment = sum;
  for (int64_t at = 0; at < count; at += LANES) {
    const __mmask16 inside = lanes(count - at);
    // where e^x is 0 x must be finite
    const __m512 below = _mm512_sub_ps(load(x + at, inside), _mm512_set1_ps(highest));
    const __m512 value = _mm512_max_ps(below, _mm512_set1_ps(-100.f)), weight = exponential(value);
    sum = _mm512_mask_add_ps(sum, inside, sum, weight);
    moment = _mm512_mask3_fmadd_ps(weight, value, moment, inside);
  }
  const float total = _mm512_reduce_add_ps(sum);
  return std::log(total) - _mm512_reduce_add_ps(moment) / total;
}

// ln of the sum of e^x where the largest is not known; NaN where these are no logits of a distribution.
template <class Number>
float log_sum_exp(const Number* x, int64_t count) {
  __m512 top = _mm512_set1_ps(-INFINITY);
  for (int64_t at = 0; at < count; at += LANES) top = _mm512_max_ps(load(x + at, lanes(count - at)), top);
  return log_sum_exp(x, count, _mm512_reduce_max_ps(top));
}

// The largest number of a row, NaN if the row has one, and where it first stands.
struct Maximum {
  float value;
  int64_t place;
};

constexpr int CHAINS = 2;  // of comparisons that do not wait for each other

// Numbers are compared as integers, 32 at a time: signed magnitudes have the order of the numbers.
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

enum Kind { KL_QP, KL_PQ, JS, AG, TV };  // the plain forms of divergence.py
constexpr float ZERO = -1e30f;             // log-probabilities at or below are those of probability 0
constexpr float LN2 = 0.693147181f;

// The terms of 16 tokens with log-probabilities a of p and b of q, both at least ZERO.
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

// D(p, q) of one row; ids: the tokens that q is about, null for all. Outside of them q is 0 and the term linear in p.
template <Kind KIND, class P, class Q>
float divergence(const P* p, int64_t columns, const Q* q, int64_t drafted, const int64_t* ids) {
  const __m512 of_p = _mm512_set1_ps(log_sum_exp(p, columns)), of_q = _mm512_set1_ps(log_sum_exp(q, drafted));
  const __m512 floor = _mm512_set1_ps(ZERO);
  __m512 sum = _mm512_setzero_ps(), mass = sum;
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
    // in this order NaN stays
    const __m512 a = _mm512_max_ps(floor, _mm512_sub_ps(own, of_p));
    const __m512 b = _mm512_max_ps(floor, _mm512_sub_ps(load(q + at, inside), of_q));
    sum = _mm512_add_ps(sum, terms<KIND>(a, b));
    if (ids) mass = _mm512_add_ps(mass, exponential(a));
  }
  float total = _mm512_reduce_add_ps(sum);
  if (ids && KIND != KL_QP) total += std::max(0.f, 1.f - _mm512_reduce_add_ps(mass)) * (KIND == JS ? LN2 / 2 : .5f);
  const float high = KIND == JS ? LN2 : KIND == TV ? 1.f : INFINITY;
  return total != total ? total : std::min(std::max(total, 0.f), high);
}

inline float number(float x) { return x; }

inline float number(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The `most` largest of x [columns] in falling order, the first of equals first, and where they stand.
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

// The `most` likeliest of x [columns], logits, in falling order, the first of equals first: ln q and where they stand.
template <class Number>
void likeliest(const Number* x, int64_t columns, int64_t most, float* log_q, int64_t* where) {
  select_largest(x, columns, most, log_q, where);
  const float total = log_sum_exp(x, columns);
  for (int64_t i = 0; i < most; ++i) log_q[i] -= total;
}

// Logits in rows of `columns`; pick: which rows are meant, null for one after the other.
template <class Number>
struct Rows {
  const Number* numbers;
  int64_t columns;
  const int64_t* pick;
  const Number* operator[](int64_t row) const { return numbers + (pick ? pick[row] : row) * columns; }
};

template <Kind KIND, class P, class Q>
void divergences(Rows<P> p, Rows<Q> q, int64_t rows, const int64_t* ids, float* out) {
  const Share share(rows);
  for (int64_t row = share.begin; row < share.end; ++row)
    out[row] = divergence<KIND>(p[row], p.columns, q[row], q.columns, ids);
}

template <class P, class Q>
void divergences(int kind, Rows<P> p, Rows<Q> q, int64_t rows, const int64_t* ids, float* out) {
  switch (kind) {
    case KL_QP: return divergences<KL_QP>(p, q, rows, ids, out);
    case KL_PQ: return divergences<KL_PQ>(p, q, rows, ids, out);
    case JS: return divergences<JS>(p, q, rows, ids, out);
    case AG: return divergences<AG>(p, q, rows, ids, out);
    default: return divergences<TV>(p, q, rows, ids, out);
  }
}

inline float of_fp16(uint16_t bits) {
  return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_castsi128_si256(_mm_cvtsi32_si128(bits))));
}

// One record's depth of one column, as a file has it in its rows.
struct Record {
  uint8_t codes[256], scales[16], least[16];  // the latter two of kinds with many runs
  uint16_t d, m;
};

uint16_t halfword(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

// Reads a record of a kind from a row; returns how many bytes it has there.
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

// Where the bits of a code lie: number k of the depth of a record, in a column of 16.
template <class F>
struct Place {
  int64_t low, high;  // bytes from the record's beginning
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

// What the numbers of a record's depth are worth in one column, each rounded once.
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

extern "C" {

// Ask the system for what the products need; 0 where it is granted. Once per process, before anything else.
int fsd_prepare() {
#ifdef __AMX_BF16__
  constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return (int)syscall(SYS_arch_prctl, REQUEST, TILES);
#else
  return 0;
#endif
}

// Rows `ids` [count] of a packed weight [rows, depth]: y [count, depth]. Returns how many ids are none of its rows.
int64_t fsd_rows(const bf16* weight, int64_t rows, int64_t depth, const int64_t* ids, int64_t count, bf16* y) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= rows) {
      ++wrong;
      continue;
    }
    const bf16* const first = weight + ids[i] / PANEL * PANEL * depth + ids[i] % PANEL * 2;
    for (int64_t k = 0; k < depth; k += 2) std::memcpy(y + i * depth + k, first + k * PANEL, 2 * sizeof(bf16));
  }
  return wrong;
}

// Bytes of a weight [columns, depth] in blocks of a kind; 0 where it cannot be held so.
int64_t fsd_block_bytes(int64_t kind, int64_t columns, int64_t depth) {
  int64_t bytes = 0;
  with_form(kind, [&](auto form) {
    using F = decltype(form);
    if (columns % PANEL == 0 && depth % F::SPAN == 0) bytes = columns / LANES * (depth / F::SPAN) * F::RECORD;
  });
  return bytes;
}

// Rows of a file to the panels of a weight [columns, depth] of that kind, whose memory is 0; order [columns]: which row
// is a column's, null for all in order. Returns how many d and m are no numbers.
int64_t fsd_block_pack(int64_t kind, const uint8_t* rows, const int64_t* order, int64_t columns, int64_t depth,
                       uint8_t* panels, int threads) {
  int64_t wrong = 0;
  with_form(kind, [&](auto form) {
    using F = decltype(form);
    const int64_t records = depth / F::SPAN;
    Record record;
    const int64_t length = read_record(kind, rows, record) * records;
    const auto none = [](uint16_t bits) { return (bits & 0x7C00) == 0x7C00; };
#pragma omp parallel num_threads(threads) reduction(+ : wrong)
    {
      const Share share(columns / LANES);
      for (int64_t column = share.begin * LANES; column < share.end * LANES; ++column) {
        const uint8_t* from = rows + (order ? order[column] : column) * length;
        uint8_t* to = panels + column / LANES * records * F::RECORD;
        Record own;
        for (int64_t r = 0; r < records; ++r, to += F::RECORD) {
          from += read_record(kind, from, own);
          wrong += none(own.d) + none(own.m);
          put<F>(own, (int)(column % LANES), to);
        }
      }
    }
  });
  return wrong;
}

// Rows `ids` [count] of a weight in blocks to y [count, depth], in bf16 (narrow) or fp32. Returns how many ids are none
// of its rows.
int64_t fsd_block_rows(const fsd_linear* layer, const int64_t* ids, int64_t count, int narrow_y, void* y, int threads) {
  int64_t wrong = 0;
  with_form(layer->kind, [&](auto form) {
    using F = decltype(form);
    const int64_t depth = layer->depth, records = depth / F::SPAN;
#pragma omp parallel num_threads(threads) reduction(+ : wrong)
    {
      const Share share(count);
      alignas(64) float values[F::SPAN];
      for (int64_t i = share.begin; i < share.end; ++i) {
        if (ids[i] < 0 || ids[i] >= layer->columns) {
          ++wrong;
          continue;
        }
        const uint8_t* record = (const uint8_t*)layer->panels + ids[i] / LANES * records * F::RECORD;
        for (int64_t at = i * depth; at < (i + 1) * depth; at += F::SPAN, record += F::RECORD) {
          get<F>(record, (int)(ids[i] % LANES), values);
          for (int k = 0; k < F::SPAN; k += LANES) {
            if (narrow_y) store((bf16*)y + at + k, _mm512_load_ps(values + k));
            else _mm512_storeu_ps((float*)y + at + k, _mm512_load_ps(values + k));
          }
        }
      }
    }
  });
  return wrong;
}

// PANEL: the layout of weights that the products read.
int fsd_panel() { return (int)PANEL; }

// y [rows, columns] of x [rows, depth]. many: there are so many rows that weights in blocks are widened to bf16 first.
void fsd_linear_forward(const bf16* x, const fsd_linear* layer, bf16* y, int64_t rows, int many, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Multiplier multiply(many);
    product(multiply, x, (int)rows, {layer},
            [&](int row, int64_t column, __m512 sum) { store(y + row * layer->columns + column, sum); });
  }
}

// Of each of `rows` rows of x [·, columns], logits in bf16 (narrow) or fp32: the largest number, NaN if there is one, where
// it first stands, and, unless `totals` is null, ln of the sum of e^x. pick [rows]: which rows, null for all in order.
void fsd_row_statistics(int narrow_x, const void* x, const int64_t* pick, int64_t rows, int64_t columns,
                        float* highest, int64_t* where, float* totals, int threads) {
  const auto of = [&](auto numbers) {
    const Rows<std::remove_const_t<std::remove_pointer_t<decltype(numbers)>>> from{numbers, columns, pick};
    const Share share(rows);
    for (int64_t row = share.begin; row < share.end; ++row) {
      const Maximum found = maximum(from[row], columns);
      highest[row] = found.value;
      where[row] = found.place;
      if (totals)
        totals[row] = std::isfinite(found.value) ? log_sum_exp(from[row], columns, found.value) : found.value;
    }
  };
#pragma omp parallel num_threads(threads)
  {
    if (narrow_x) of((const bf16*)x);
    else of((const float*)x);
  }
}

// Of each of `rows` rows of x, as above: the entropy of its softmax; its largest number where that is infinite or NaN.
void fsd_row_entropies(int narrow_x, const void* x, const int64_t* pick, int64_t rows, int64_t columns,
                       float* entropies, int threads) {
  const auto of = [&](auto numbers) {
    const Rows<std::remove_const_t<std::remove_pointer_t<decltype(numbers)>>> from{numbers, columns, pick};
    const Share share(rows);
    for (int64_t row = share.begin; row < share.end; ++row) {
      const float highest = maximum(from[row], columns).value;
      entropies[row] = std::isfinite(highest) ? entropy(from[row], columns, highest) : highest;
    }
  };
#pragma omp parallel num_threads(threads)
  {
    if (narrow_x) of((const bf16*)x);
    else of((const float*)x);
  }
}

// Divergence `kind` of rows of q [·, drafted] from rows of p [·, columns], each bf16 (narrow) or fp32, into out [rows],
// all logits. p_rows, q_rows [rows]: which rows these are, null for one after the other.
// ids [drafted]: the tokens that q is about, null if all; not with the kinds that are infinite there.
void fsd_divergence(int kind, int64_t rows, int narrow_p, const void* p, const int64_t* p_rows, int64_t columns,
                    int narrow_q, const void* q, const int64_t* q_rows, int64_t drafted, const int64_t* ids, float* out,
                    int threads) {
#pragma omp parallel num_threads(threads)
  {
    const auto from = [&](auto p_numbers) {
      const Rows<std::remove_const_t<std::remove_pointer_t<decltype(p_numbers)>>> of_p{p_numbers, columns, p_rows};
      if (narrow_q) divergences(kind, of_p, Rows<bf16>{(const bf16*)q, drafted, q_rows}, rows, ids, out);
      else divergences(kind, of_p, Rows<float>{(const float*)q, drafted, q_rows}, rows, ids, out);
    };
    if (narrow_p) from((const bf16*)p);
    else from((const float*)p);
  }
}

// The `most` (at most `columns`) likeliest of each row of x [rows, columns], logits in bf16 (narrow) or fp32: their
// log-probabilities and places [rows, most].
void fsd_likeliest(int narrow_x, const void* x, int64_t rows, int64_t columns, int64_t most, float* log_q,
                   int64_t* where, int threads) {
#pragma omp parallel num_threads(threads)
  {
    const Share share(rows);
    for (int64_t row = share.begin; row < share.end; ++row) {
      float* const values = log_q + row * most;
      int64_t* const places = where + row * most;
      if (narrow_x) likeliest((const bf16*)x + row * columns, columns, most, values, places);
      else likeliest((const float*)x + row * columns, columns, most, values, places);
    }
  }
}

// Rows of x [rows, columns] into out: numbers below the `most`-th largest (at most `columns`) of their row become `other`.
// NaN stays.
void fsd_keep_largest(const float* x, int64_t rows, int64_t columns, int64_t most, float other, float* out,
                      int threads) {
#pragma omp parallel num_threads(threads)
  {
    const Share share(rows);
    std::vector<float> largest(most);
    std::vector<int64_t> places(most);
    for (int64_t row = share.begin; row < share.end; ++row) {
      const float* const from = x + row * columns;
      float* const to = out + row * columns;
      select_largest(from, columns, most, largest.data(), places.data());
      const __m512 least = _mm512_set1_ps(largest[most - 1]), removed = _mm512_set1_ps(other);
      for (int64_t at = 0; at < columns; at += LANES) {
        const __mmask16 inside = lanes(columns - at);
        const __m512 values = load(from + at, inside);
        const __mmask16 below = _mm512_cmp_ps_mask(values, least, _CMP_LT_OQ);
        _mm512_mask_storeu_ps(to + at, inside, _mm512_mask_mov_ps(values, below, removed));
      }
    }
  }
}

// found [trees, count, count]: 1 where the second node is an ancestor of the first, or is it. A node's parent, by
// parents [trees, count], stands before it; anything else counts as the root.
void fsd_ancestors(const int64_t* parents, int64_t trees, int64_t count, uint8_t* found) {
  for (int64_t tree = 0; tree < trees; ++tree, parents += count, found += count * count) {
    std::memset(found, 0, count * count);
    for (int64_t node = 0; node < count; ++node) {
      uint8_t* const own = found + node * count;
      const int64_t parent = parents[node] >= 0 && parents[node] < node ? parents[node] : 0;
      if (node) std::memcpy(own, found + parent * count, count);
      own[node] = 1;
    }
  }
}

// The union of `main` and `side`, trees of the same root, in each of `trees` rows: the nodes of main, then those of side
// without its root. See union_of in graft.py. Parents stand before their children; padding has a score of -inf.
void fsd_union(int64_t trees, const fsd_tree* main, const fsd_tree* side, int64_t mains, int64_t* tokens,
               int64_t* parents, float* scores, int64_t* proposers) {
  const int64_t first = main->count, own = side->count, count = first + own - 1;
  std::vector<int64_t> place(own);
  std::vector<float> chance(count), total(count);
  for (int64_t row = 0; row < trees; ++row, tokens += count, parents += count, scores += count, proposers += count) {
    const auto above = [&](const fsd_tree* tree, int64_t node) {
      const int64_t parent = tree->parents[row * tree->count + node];
      return parent >= 0 && parent < node ? parent : 0;
    };
    const auto put = [&](const fsd_tree* tree, int64_t node, int64_t at, int64_t parent, int64_t before) {
      const int64_t start = row * tree->count;
      const float step = tree->scores[start + node] - tree->scores[start + above(tree, node)];
      tokens[at] = tree->tokens[start + node], parents[at] = parent;
      proposers[at] = before + (tree->proposers ? tree->proposers[start + node] : 0);
      chance[at] = std::exp(std::min(step, 0.f));  // given its parent; 0 at padding
    };
    for (int64_t node = 0; node < first; ++node) put(main, node, node, above(main, node), 0);
    place[0] = 0;
    for (int64_t node = 1; node < own; ++node) {
      const int64_t at = first - 1 + node, parent = place[above(side, node)];
      put(side, node, at, parent, mains);
      place[node] = at;
      for (int64_t same = 1; same < first && parent < first && chance[at] > 0; ++same)
        if (parents[same] == parent && tokens[same] == tokens[at] && chance[same] > 0) {
          chance[same] += chance[at] - chance[same] * chance[at];
          chance[at] = 0, place[node] = same;
        }
    }
    std::fill(total.begin(), total.end(), 0.f);
    for (int64_t node = 1; node < count; ++node) total[parents[node]] += chance[node];
    scores[0] = 0;
    for (int64_t node = 1; node < count; ++node)
      scores[node] = scores[parents[node]] + std::log(std::min(chance[node] / std::max(total[parents[node]], 1.f), 1.f));
  }
}

// A decoder layer of the Llama kind. Norms are vectors; those marked * may be null.
struct fsd_layer {
  fsd_linear query, key, value, output, gate, up, down;
  const bf16 *input_norm /* * */, *query_norm /* * */, *key_norm /* * */, *mlp_norm;
};

// Layers of equal sizes, one after the other.
struct fsd_stack {
  const fsd_layer* layers;
  int64_t number, hidden, inner, query_heads, key_heads, width;
  float epsilon, scale;
};

// One forward. Keys and values are [layers, batch, key heads, slots, width] by strides.
struct fsd_forward {
  int64_t batch, count;           // rows of x: batch · count
  const bf16* x;                  // [rows, hidden]
  const bf16* attended;           // [rows, depth of the first layer's queries]: what its attention reads; null: norm(x)
  const int64_t* positions;       // [rows]
  const int64_t* slots;           // [rows], where new keys and values go
  const bf16 *cosine, *sine;      // [angles, width] by position
  int64_t angles;
  const uint8_t* const* visible;  // of each layer: [batch, count, used]
  int64_t used;                   // slots attended to
  bf16 *keys, *values;
  int64_t capacity, layer_stride, batch_stride, head_stride, slot_stride;
  bf16* const* outputs;           // of each layer: [rows, hidden], where its output is wanted, or null
  const bf16* final_norm;         // null: none
  bf16* out;                      // [rows, hidden], of the last layer, normed
  bf16* scratch;                  // fsd_scratch(...) bytes
  int64_t many;                   // see fsd_linear_forward
  int64_t threads;
};

namespace {

// Where a forward keeps what lies between its steps. Sizes in bf16 numbers.
struct Scratch {
  int64_t states, projected, attended, gated, own;

  Scratch(const fsd_stack* stack, const fsd_forward* f) {
    const int64_t rows = f->batch * f->count;
    states = rows * stack->hidden;
    projected = rows * (stack->query_heads + 2 * stack->key_heads) * stack->width;
    attended = rows * stack->query_heads * stack->width;
    gated = rows * stack->inner;
    const int64_t scores = 2 * QUERIES * (f->used + 2 * LANES), block = LANES * stack->width, gates = 2 * rows * PANEL;
    own = std::max(scores + block + 2 * LANES * stack->width, gates);  // of each thread
  }

  int64_t total(int64_t threads) const { return 4 * states + projected + attended + gated + threads * own; }
};

// out = x + attention(norm(x)), then out + mlp(norm(out)); x, out [rows, hidden], not the same memory. Called by all
// threads of a team; what follows needs a barrier first.
void layer_forward(Multiplier& multiply, const fsd_stack* stack, const fsd_forward* f, int64_t index, const bf16* x,
                   bf16* out) {
  const fsd_layer& layer = stack->layers[index];
  const int rows = (int)(f->batch * f->count);
  const int64_t hidden = stack->hidden, inner = stack->inner, width = stack->width;
  const int64_t query_heads = stack->query_heads, key_heads = stack->key_heads, group = query_heads / key_heads;
  const int64_t across = query_heads * width, heads = query_heads + 2 * key_heads;
  const Scratch scratch(stack, f);
  bf16* const normed = f->scratch;
  bf16* const middle = normed + scratch.states;         // x + attention
  bf16* const projected = normed + 4 * scratch.states;  // [rows, heads · width]: queries, keys, values
  bf16* const attended = projected + scratch.projected;
  bf16* const gated = attended + scratch.attended;      // act(gate) · up
  bf16* const private_memory = gated + scratch.gated;
  bf16* const keys = f->keys + index * f->layer_stride;
  bf16* const values = f->values + index * f->layer_stride;
  const uint8_t* const visible = f->visible[index];

  const Share own_rows(rows);
  float* const scores = (float*)(private_memory + omp_get_thread_num() * scratch.own);
  int32_t* const block = (int32_t*)(scores + QUERIES * (f->used + 2 * LANES));
  bf16* const some_keys = (bf16*)(block + LANES * width / 2);
  float* const gates = scores;

  const bf16* read = index == 0 && f->attended ? f->attended : x;
  if (read == x && layer.input_norm) {
    for (int64_t row = own_rows.begin; row < own_rows.end; ++row)
      rms_norm(x + row * hidden, layer.input_norm, stack->epsilon, hidden, normed + row * hidden);
    read = normed;
#pragma omp barrier
  }
  product(multiply, read, rows, {&layer.query, &layer.key, &layer.value},
          [&](int row, int64_t column, __m512 sum) { store(projected + row * heads * width + column, sum); });
#pragma omp barrier
  const Share own_heads(rows * heads);  // queries are turned in place; keys and values go to their slots
  for (int64_t unit = own_heads.begin; unit < own_heads.end; ++unit) {
    const int64_t row = unit / heads, head = unit % heads, side = head - query_heads;
    bf16* const from = projected + unit * width;
    const auto slot = [&](bf16* storage, int64_t which) {
      return storage + row / f->count * f->batch_stride + which * f->head_stride + f->slots[row] * f->slot_stride;
    };
    if (side >= key_heads) {
      std::memcpy(slot(values, side - key_heads), from, width * sizeof(bf16));
      continue;
    }
    const bf16* const norm = side < 0 ? layer.query_norm : layer.key_norm;
    if (norm) rms_norm(from, norm, stack->epsilon, width, from);
    const int64_t angle = f->positions[row] * width;
    rotate(from, f->cosine + angle, f->sine + angle, width, side < 0 ? from : slot(keys, side));
  }
#pragma omp barrier
  // the queries of a group of heads, in parts of at most QUERIES, share keys and values
  const int64_t queries = group * f->count, parts = (queries + QUERIES - 1) / QUERIES;
  const Share own_parts(f->batch * key_heads * parts);
  for (int64_t unit = own_parts.begin; unit < own_parts.end; ++unit) {
    const int64_t part = unit % parts, head = unit / parts % key_heads, b = unit / parts / key_heads;
    const int64_t first = queries * part / parts, last = queries * (part + 1) / parts;
    const bf16* from[QUERIES];
    bf16* to[QUERIES];
    const uint8_t* seen[QUERIES];
    int64_t slots = 1;  // none of them sees further
    for (int64_t q = first; q < last; ++q) {
      const int64_t row = b * f->count + q / group, column = (head * group + q % group) * width;
      from[q - first] = projected + row * heads * width + column;
      to[q - first] = attended + row * across + column;
      seen[q - first] = visible + row * f->used;
      const void* const latest = memrchr(seen[q - first], 1, f->used);
      if (latest) slots = std::max(slots, 1 + ((const uint8_t*)latest - seen[q - first]));
    }
    const bf16* const k = keys + b * f->batch_stride + head * f->head_stride;
    const bf16* const v = values + b * f->batch_stride + head * f->head_stride;
    attend(multiply, (int)(last - first), from, k, v, f->slot_stride, slots, width, stack->scale, seen, scores, block,
           some_keys, to);
  }
#pragma omp barrier
  product(multiply, attended, rows, {&layer.output}, [&](int row, int64_t column, __m512 sum) {
    const int64_t at = row * hidden + column;
    store(middle + at, _mm512_add_ps(load(x + at), sum));
  });
#pragma omp barrier
  for (int64_t row = own_rows.begin; row < own_rows.end; ++row)
    rms_norm(middle + row * hidden, layer.mlp_norm, stack->epsilon, hidden, normed + row * hidden);
#pragma omp barrier
  const Share own_panels(inner / PANEL);  // each of gates with the one of ups that it multiplies
  take(multiply, normed, rows, {&layer.gate, &layer.up});
  for (int64_t p = own_panels.begin; p < own_panels.end; ++p) {
    panel_product(multiply, normed, rows, layer.gate, p, [&](int row, int at, __m512 sum) {
      const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.f), exponential(_mm512_sub_ps(_mm512_setzero_ps(), sum)));
      _mm512_storeu_ps(gates + row * PANEL + at, _mm512_div_ps(sum, below));
    });
    panel_product(multiply, normed, rows, layer.up, p, [&](int row, int at, __m512 sum) {
      store(gated + row * inner + p * PANEL + at, _mm512_mul_ps(_mm512_loadu_ps(gates + row * PANEL + at), sum));
    });
  }
#pragma omp barrier
  product(multiply, gated, rows, {&layer.down}, [&](int row, int64_t column, __m512 sum) {
    const int64_t at = row * hidden + column;
    store(out + at, _mm512_add_ps(load(middle + at), sum));
  });
}

// How many of `count` numbers are none from 0 to `end`, exclusively.
int64_t outside(const int64_t* numbers, int64_t count, int64_t end) {
  return std::count_if(numbers, numbers + count, [&](int64_t number) { return number < 0 || number >= end; });
}

}  // namespace

// Bytes that fsd_stack_forward needs as scratch.
int64_t fsd_scratch(const fsd_stack* stack, const fsd_forward* f) {
  return (int64_t)sizeof(bf16) * Scratch(stack, f).total(f->threads);
}

// Runs the layers. Returns how many slots and positions there are not; then nothing was done.
int64_t fsd_stack_forward(const fsd_stack* stack, const fsd_forward* f) {
  const int64_t rows = f->batch * f->count, hidden = stack->hidden, size = rows * hidden;
  const int64_t wrong = outside(f->slots, rows, f->capacity) + outside(f->positions, rows, f->angles);
  if (wrong) return wrong;
#pragma omp parallel num_threads((int)f->threads)
  {
    Multiplier multiply(f->many);
    const bf16* x = f->x;
    for (int64_t l = 0; l < stack->number; ++l) {
      bf16* to = f->outputs[l] ? f->outputs[l] : f->scratch + (2 + l % 2) * size;
      if (l + 1 == stack->number && !f->final_norm) to = f->out;
      layer_forward(multiply, stack, f, l, x, to);
#pragma omp barrier
      x = to;
    }
    if (f->final_norm) {
      const Share own(rows);
      for (int64_t row = own.begin; row < own.end; ++row)
        rms_norm(x + row * hidden, f->final_norm, stack->epsilon, hidden, f->out + row * hidden);
    }
  }
  return 0;
}

}  // extern "C"
