// Kernels for decoding in bf16 on CPUs with AVX512-BF16, over the few tokens of a draft or a verifying forward.
//
// Plain C interface for ctypes; compiled on the user's machine by kernels.py. bf16 values are passed as uint16_t.
// A weight W [N, K] lies as oneDNN packs it, in panels of output columns: [N / PANEL][K / 2][PANEL][2]. Where the CPU
// has AMX, panels are of 32 columns and products run on its tiles; elsewhere of 64, and on vectors. A weight may be
// of fp8 numbers in the same places, with a scale per column: half as much to read, and every one of them is a bf16.
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
#include <vector>

// A linear layer, [columns, depth].
struct fsd_linear {
  const void* panels;    // of the packed weight
  const float* scales;   // [columns], by which the fp8 numbers of a column are multiplied; null: bf16
  const uint16_t* bias;  // [columns] or null
  int64_t columns, depth;
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

// Products of at most MOST rows with one panel. While a panel is read, part `part` of `parts` of the next one is
// fetched: later groups of rows find their panel in the cache and would leave the memory idle.
#ifdef __AMX_BF16__

// This thread's tiles: sums of rows 0-15 and 16-31 with either half of a panel, those rows of x, the halves.
class Multiplier {
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

class Multiplier {
 public:
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
  if (scales) panel_product(multiply, x, rows, layer.depth, (const fp8*)layer.panels + start, finished);
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

// PANEL: the layout of weights that the products read.
int fsd_panel() { return (int)PANEL; }

// y [rows, columns] of x [rows, depth].
void fsd_linear_forward(const bf16* x, const fsd_linear* layer, bf16* y, int64_t rows, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Multiplier multiply;
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
    Multiplier multiply;
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
