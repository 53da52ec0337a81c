// Products of some rows with a packed weight, panel by panel, shared out among the threads of a team.
#pragma once

#include "blocks.h"
#include "interface.h"

#include <omp.h>

#include <algorithm>
#include <initializer_list>
#include <vector>

namespace {

// Widen panel `p` of a weight in blocks to the layout of a packed weight.
const bf16* widened(Interleaved& x, const fsd_linear& layer, int64_t p) {
  const Tiles& tiles = tiles_of(layer.kind);
  const int64_t size = layer.depth / tiles.span * tiles.record;
  x.panel.resize(layer.depth * PANEL);
  for (int v = 0; v < V; ++v)
    tiles.widen((const uint8_t*)layer.panels + (p * V + v) * size, layer.depth, x.panel.data() + v * 2 * LANES, 2 * PANEL);
  return x.panel.data();
}

// panel_product for a weight in blocks. Multiplier::take has read x.
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

// A Multiplier computes products of at most MOST rows with one panel. Meanwhile it prefetches part `part` of `parts` of
// the next panel, because later groups of rows find their panel in the cache and would leave memory idle.
#ifdef __AMX_BF16__

// This thread's AMX tiles: four of sums (rows 0-15 and 16-31, by half a panel each), two of x, two of the panel.
class Multiplier : public Interleaved {
  using Interleaved::Interleaved;
  int rows = 0;  // rows that the tiles are configured for

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
    constexpr int64_t STEP = 2 * LANES * PANEL;  // numbers of a panel per step, for 2 * LANES columns of x
    constexpr int LINE = 64 / sizeof(Number), LINES = STEP / LINE;
    constexpr bool NARROW = sizeof(Number) < sizeof(bf16);
    // Tiles load from memory only. Widen one step ahead, so that the stores have completed.
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

// sums [M, PANEL] = x Wt for M rows and one panel, in registers. Each step prefetches `lines` cache lines, at most two, of
// the next panel. Not inlined: within a larger function, compilers keep the sums in memory.
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

// Multiply any number of rows with one panel, in groups of nearly equal size; calls done(row, column, 16 sums).
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

// Read x for the panel_products that follow, if one of the layers needs it interleaved.
inline void take(Multiplier& multiply, const bf16* x, int rows, std::initializer_list<const fsd_linear*> layers) {
  for (const fsd_linear* layer : layers)
    if (layer->kind && !multiply.many) return multiply.take(x, rows, layer->depth);
}

// Multiply with panel `p` of a linear layer and add the bias; calls done(row, column within the panel, 16 sums).
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

// This thread's part [begin, end) of `units`.
struct Share {
  int64_t begin, end;
  explicit Share(int64_t units) {
    const int64_t count = omp_get_num_threads(), own = omp_get_thread_num();
    begin = units * own / count, end = units * (own + 1) / count;
  }
};

// Compute this thread's output columns of one linear layer, or of several side by side, for x [rows, depth]; calls
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

}  // namespace
