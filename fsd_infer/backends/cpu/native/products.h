// Products of some rows with a packed weight, panel by panel, shared out among the threads of a team.
#pragma once

#include "block_products.h"
#include "interface.h"

#include <omp.h>

#include <algorithm>
#include <initializer_list>
#include <vector>

namespace {

constexpr int BLOCK_SIDE = 32;  // columns of a weight in blocks that a thread computes at a time
constexpr int WIDEST = 64;      // most columns of a panel

// Widen BLOCK_SIDE columns from `column` on of a weight in blocks to the layout of a packed weight.
const bf16* widened(Interleaved& x, const fsd_linear& layer, int64_t column) {
  const Products& products = products_of(layer.kind);
  const int64_t size = layer.depth / products.span * products.record;
  x.panel.resize(layer.depth * BLOCK_SIDE);
  for (int64_t at = 0; at < BLOCK_SIDE; at += LANES)
    products.widen((const uint8_t*)layer.panels + (column + at) / LANES * size, layer.depth, x.panel.data() + 2 * at,
                2 * BLOCK_SIDE);
  return x.panel.data();
}

// A Multiplier computes products of at most most<SIDE> rows with one panel of SIDE columns. Meanwhile it prefetches part
// `part` of `parts` of the next panel, because later groups of rows find their panel in the cache and would leave memory
// idle.
#ifdef __AMX_BF16__

template <int SIDE>
constexpr int most = 32;  // rows whose sums, with x and weights, fit eight tiles

// This thread's AMX tiles: four of sums (rows 0-15 and 16-31, by 16 columns each), two of x, two of the panel.
class Multiplier : public Interleaved {
  using Interleaved::Interleaved;
  int shaped = 0;  // for what the tiles are configured; 0: nothing

  struct alignas(64) Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  };

  void load(const Shape& tiles, int key) {
    finish_stores(&tiles);
    _tile_loadconfig(&tiles);
    shaped = key;
  }

  void shape(int count) {
    if (shaped == count) return;
    const uint8_t low = (uint8_t)std::min(count, LANES), high = (uint8_t)std::max(count - LANES, 1);
    Shape tiles;
    const uint8_t heights[8] = {low, low, high, high, low, high, LANES, LANES};
    std::memcpy(tiles.rows, heights, sizeof heights);
    load(tiles, count);
  }

  // The product with 32 of a panel's columns; panel, next and sums begin at the first of them.
  template <int SIDE, class Number>
  void multiply(int count, const bf16* x, int64_t depth, const Number* panel, const Number* next, int part, int parts,
                float* sums) {
    constexpr int64_t STEP = 2 * LANES * SIDE;  // numbers of a panel per step, for 2 * LANES columns of x
    constexpr int LINE = 64 / sizeof(Number), LINES = 4 * LANES / LINE;
    constexpr bool NARROW = sizeof(Number) < sizeof(bf16);
    constexpr int64_t APART = NARROW ? 8 * LANES : 4 * SIDE;  // bytes between pairs of depth
    // Tiles load from memory only. Widen one step ahead, so that the stores have completed.
    alignas(64) bf16 wide[2][NARROW ? LANES * 4 * LANES : 1];
    const auto widen = [&](int64_t k) {
      for (int64_t pair = 0; pair < LANES; ++pair)
        for (int64_t i = 0; i < 4 * LANES; i += 2 * LANES)
          _mm512_store_si512(wide[k % 2] + pair * 4 * LANES + i, widened(panel + k * STEP + pair * 2 * SIDE + i));
    };
    const int64_t steps = depth / (2 * LANES);
    const int first = LANES * part / parts, last = LANES * (part + 1) / parts;
    const bf16* const below = x + LANES * depth;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (NARROW) widen(0);
    finish_stores();
    for (int64_t k = 0; k < steps; ++k) {
      for (int pair = first; pair < last; ++pair)
        for (int line = 0; line < LINES; ++line)
          _mm_prefetch((const char*)(next + k * STEP + pair * 2 * SIDE + line * LINE), _MM_HINT_T1);
      if (NARROW) finish_stores();
      if (NARROW && k + 1 < steps) widen(k + 1);
      const bf16* const from = NARROW ? wide[k % 2] : (const bf16*)panel + k * STEP;
      _tile_loadd(6, from, APART);
      _tile_loadd(7, from + 2 * LANES, APART);
      _tile_loadd(4, x + k * 2 * LANES, depth * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (count > LANES) {
        _tile_loadd(5, below + k * 2 * LANES, depth * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums, SIDE * 4);
    _tile_stored(1, sums + LANES, SIDE * 4);
    if (count > LANES) {
      _tile_stored(2, sums + LANES * SIDE, SIDE * 4);
      _tile_stored(3, sums + LANES * SIDE + LANES, SIDE * 4);
    }
  }

 public:
  ~Multiplier() {
    if (shaped) _tile_release();
  }

  // Shape tiles 0 to 3 for sums [·, 16], 4 and 5 for bytes of x, 6 and 7 for codes [·, 16, 4]. A tile holds rows of high and
  // low bytes side by side if products join them, or below each other if they fit.
  void shape_for_blocks(int rows, const Products& products) {
    const int key = 1000 * products.joined + 100 * rows + products.run;
    if (shaped == key) return;
    const int bytes = products.joined ? 2 * products.run : products.run;
    Shape tiles;
    tiles.bytes[4] = tiles.bytes[5] = (uint16_t)bytes;
    for (int tile = 0; tile < 8; ++tile)
      tiles.rows[tile] = (uint8_t)(tile >= 6 ? bytes / 4 : products.joined || 2 * rows > LANES ? rows : 2 * rows);
    load(tiles, key);
  }

  // dots [2 · 16, 16] of two runs of 16 rows, `stride` numbers apart, with 16 columns [depth / 2][16][2].
  void dots(const bf16* low, const bf16* high, int64_t stride, const int32_t* columns, int64_t depth, float* low_dots,
            float* high_dots) {
    shape(2 * LANES);
    finish_stores();
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

  template <int SIDE, class Number>
  void operator()(int count, const bf16* x, int64_t depth, const Number* panel, const Number* next, int part, int parts,
                  float* sums) {
    shape(count);
    for (int at = 0; at < SIDE; at += 2 * LANES)
      multiply<SIDE>(count, x, depth, panel + 2 * at, next + 2 * at, part, parts, sums + at);
  }
};

#else

#ifdef __AVX512F__

template <int SIDE>
constexpr int most = SIDE == WIDEST ? 6 : 12;  // rows whose sums, with x and weights, fit the registers

// sums [M, SIDE] = x Wt for M rows and one panel, in registers. Each step prefetches `lines` cache lines, at most two, of
// the next panel. Neither inlined nor with loops over rows: there, compilers keep the sums in memory.
template <int M, int SIDE, class Number>
__attribute__((noinline)) void tile(const bf16* x, int64_t depth, const Number* panel, const Number* next, int lines,
                                    float* sums) {
  constexpr int V = SIDE / LANES;
  __m512 sum[M][V];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) sum[m][v] = _mm512_setzero_ps();
  for (int64_t k = 0; k < depth / 2; ++k) {
    __m512bh w[V];
    for (int v = 0; v < V; ++v) w[v] = (__m512bh)widened(panel + k * 2 * SIDE + v * 2 * LANES);
    if (lines > 0) _mm_prefetch((const char*)(next + k * 2 * SIDE), _MM_HINT_T1);
    if (lines > 1) _mm_prefetch((const char*)(next + k * 2 * SIDE) + 64, _MM_HINT_T1);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, x + m * depth + 2 * k, sizeof pair);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int v = 0; v < V; ++v) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], both, w[v]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(sums + m * SIDE + v * LANES, sum[m][v]);
}

#else

template <int SIDE>
constexpr int most = 6;  // rows whose sums of 16 columns, with x and weights, fit the registers

// Add the products of `pairs` pairs of depth to sums [M, SIDE], of which these are the first OWN columns, or begin with them.
// With `fetch`, ask for the panel's next parts. Neither inlined nor with loops over rows: there, compilers keep the sums in
// memory.
template <int M, int SIDE, int OWN>
__attribute__((noinline)) void add_products(const float* x, int64_t depth, const bf16* panel, int64_t pairs, bool begin,
                                            bool fetch, float* sums) {
  constexpr int V = OWN / 8;
  __m256 sum[M][V];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[m][v] = begin ? _mm256_setzero_ps() : _mm256_loadu_ps(sums + m * SIDE + v * 8);
  for (int64_t k = 0; k < pairs; ++k) {
    const bf16* const step = panel + k * 2 * SIDE;
    if (fetch) fetch_ahead(step, 2 * SIDE * sizeof(bf16));
#pragma GCC unroll 16
    for (int v = 0; v < V; v += 2) {
      Integers both;
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        if (odd == 0 || M > 2) {  // of many rows, the sums leave no registers for both
          finish_stores();
          both = widened(step + v * 16);
          in_registers(both);
        }
        const __m256 low = half_of_pairs(both.low, odd), high = half_of_pairs(both.high, odd);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const __m256 number = _mm256_broadcast_ss(x + m * depth + 2 * k + odd);
          add_product(sum[m][v], number, low), add_product(sum[m][v + 1], number, high);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) _mm256_storeu_ps(sums + m * SIDE + v * 8, sum[m][v]);
}

// sums [M, SIDE] = x Wt for M rows and one panel. Sums of 16 or 32 columns fit the registers, so a part of the panel that
// fits the first cache is read for all columns before the next part. fp8 numbers are widened there.
template <int M, int SIDE, class Number>
void tile(const float* x, int64_t depth, const Number* panel, const Number*, int, float* sums) {
  constexpr int OWN = M > 2 ? LANES : 2 * LANES;
  constexpr bool NARROW = sizeof(Number) < sizeof(bf16);
  constexpr int64_t PART = OWN < SIDE || NARROW ? 64 : INT64_MAX / 2;  // pairs
  alignas(64) bf16 wide[NARROW ? PART * 2 * SIDE : 1];
  for (int64_t k = 0, pairs; k < depth / 2; k += pairs) {
    pairs = std::min(PART, depth / 2 - k);
    const Number* const part = panel + 2 * k * SIDE;
    const bf16* from = (const bf16*)part;
    if constexpr (NARROW) {
      for (int64_t at = 0; at < pairs * 2 * SIDE; at += 2 * LANES) {
        if (at % 64 == 0) fetch_ahead(part + at, 64);
        _mm512_store_si512(wide + at, widened(part + at));
      }
      from = wide;
    }
    for (int at = 0; at < SIDE; at += OWN)
      add_products<M, SIDE, OWN>(x + 2 * k, depth, from + 2 * at, pairs, k == 0, M > 1 && at == 0 && !NARROW, sums + at);
  }
}

#endif

class Multiplier : public Interleaved {
  template <class Number>
  using Tile = void (*)(const Plain*, int64_t, const Number*, const Number*, int, float*);

  template <int SIDE, class Number, int... M>
  static Tile<Number> tile_of(int count, std::integer_sequence<int, M...>) {
    static constexpr Tile<Number> all[] = {tile<M + 1, SIDE, Number>...};
    return all[count - 1];
  }

 public:
  using Interleaved::Interleaved;

  void shape_for_blocks(int, const Products&) {}

  template <int SIDE, class Number>
  void operator()(int count, const Plain* x, int64_t depth, const Number* panel, const Number* next, int part, int parts,
                  float* sums) const {
    constexpr int LINE = 64 / sizeof(Number), LINES = 2 * SIDE / LINE;
    const int first = LINES * part / parts, lines = parts == 1 ? 0 : LINES * (part + 1) / parts - first;
    const auto compute = tile_of<SIDE, Number>(count, std::make_integer_sequence<int, most<SIDE>>{});
    compute(x, depth, panel, next + first * LINE, lines, sums);
  }
};

#endif

// panel_product for BLOCK_SIDE columns of a weight in blocks. Multiplier::take has read x.
template <class Done>
inline void block_panel_product(Multiplier& x, const fsd_linear& layer, int64_t column, Done done) {
  const Products& products = products_of(layer.kind);
  const int64_t bytes = layer.depth / products.span * products.record;
  const uint8_t* const panel = (const uint8_t*)layer.panels + column / LANES * bytes;
  const int size = SIZES[x.size];
  if (size > MOST_ON_VECTORS) x.shape_for_blocks(size, products);
  for (int begin = 0; begin < x.groups; begin += NEAR) {
    const int end = std::min(begin + NEAR, x.groups);
    for (int at = 0; at < BLOCK_SIDE; at += LANES) {
      products.of[x.size](x.numbers(products.layout, begin), end - begin, layer.depth, panel + at / LANES * bytes,
                          x.found[0].numbers);
      for (int group = begin; group < end; ++group)
        for (int row = x.first(group); row < x.first(group + 1); ++row)
          done(row, at, _mm512_load_ps(x.found[(group - begin) * size + row - x.first(group)].numbers));
    }
  }
}

// Multiply any number of rows with one panel, in groups of nearly equal size; calls done(row, column, 16 sums).
template <int SIDE, class Number, class Done>
inline void panel_product(Multiplier& multiply, const Plain* x, int rows, int64_t depth, const Number* panel, Done done) {
  constexpr int MOST = most<SIDE>;
  const int groups = (rows + MOST - 1) / MOST;
  for (int group = 0, row = 0; group < groups; ++group) {
    const int count = (rows - row + groups - group - 1) / (groups - group);
    alignas(64) float sums[MOST * SIDE];
    multiply.template operator()<SIDE>(count, x + row * depth, depth, panel, panel + depth * SIDE, group, groups, sums);
    for (int m = 0; m < count; ++m)
      for (int at = 0; at < SIDE; at += LANES) done(row + m, at, _mm512_loadu_ps(sums + m * SIDE + at));
    row += count;
  }
}

// Read x for the panel_products that follow, in each layout that one of the layers needs.
inline void take(Multiplier& multiply, const bf16* x, int rows, std::initializer_list<const fsd_linear*> layers) {
  bool taken[LAYOUTS] = {}, plain = false;
  for (const fsd_linear* layer : layers) {
    if (!layer->kind || multiply.many) {
      if (!plain) multiply.take_plain(x, rows * layer->depth);
      plain = true;
      continue;
    }
    const Layout layout = products_of(layer->kind).layout;
    if (!taken[layout]) multiply.take(x, rows, layer->depth, layout);
    taken[layout] = true;
  }
}

// Multiply with the columns [start, start + layer.side) of a linear layer and add the bias; calls done(row, column - start,
// 16 sums).
template <class Done>
inline void panel_product(Multiplier& multiply, const bf16* x, int rows, const fsd_linear& layer, int64_t start, Done done) {
  const auto finished = [&](int row, int at, __m512 sum) {
    if (layer.scales) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(layer.scales + start + at));
    if (layer.bias) sum = _mm512_add_ps(sum, load(layer.bias + start + at));
    done(row, at, sum);
  };
  const auto packed = [&](auto* numbers) {
    const Plain* const plain = multiply.plain_numbers(x);
    if (layer.side == WIDEST) panel_product<WIDEST>(multiply, plain, rows, layer.depth, numbers, finished);
    else panel_product<WIDEST / 2>(multiply, plain, rows, layer.depth, numbers, finished);
  };
  if (layer.kind && multiply.many) packed(widened(multiply, layer, start));
  else if (layer.kind) block_panel_product(multiply, layer, start, finished);
  else if (layer.scales) packed((const fp8*)layer.panels + start * layer.depth);
  else packed((const bf16*)layer.panels + start * layer.depth);
}

// This thread's part [begin, end) of `units`.
struct Share {
  int64_t begin, end;
  explicit Share(int64_t units) {
    const int64_t count = omp_get_num_threads(), own = omp_get_thread_num();
    begin = units * own / count, end = units * (own + 1) / count;
  }
  Share(int64_t begin, int64_t end) : begin(begin), end(end) {}
};

// Divide `units` among all threads, also where there are fewer: call of(unit, part) for this thread's, where part(size) is
// its Share of a unit's `size` pieces.
template <class Of>
inline void share_units(int64_t units, Of of) {
  const int64_t count = omp_get_num_threads();
  const Share own(units * count);  // each unit has `count` parts
  for (int64_t at = own.begin, next; at < own.end; at = next) {
    const int64_t unit = at / count, before = unit * count;
    next = std::min(own.end, before + count);
    of(unit, [=](int64_t size) { return Share(size * (at - before) / count, size * (next - before) / count); });
  }
}

// Compute this thread's output columns of one linear layer, or of several side by side, for x [rows, depth]; calls
// done(row, column, 16 sums).
template <class Done>
inline void product(Multiplier& multiply, const bf16* x, int rows, std::initializer_list<const fsd_linear*> layers,
                    Done done) {
  int64_t panels = 0, before = 0, first = 0;  // panels and columns of the layers before
  take(multiply, x, rows, layers);
  for (const fsd_linear* layer : layers) panels += layer->columns / layer->side;
  const Share share(panels);
  for (const fsd_linear* layer : layers) {
    const int64_t own = layer->columns / layer->side;
    for (int64_t p = std::max(share.begin, before); p < std::min(share.end, before + own); ++p) {
      const int64_t start = (p - before) * layer->side;
      panel_product(multiply, x, rows, *layer, start,
                    [&](int row, int at, __m512 sum) { done(row, first + start + at, sum); });
    }
    before += own, first += layer->columns;
  }
}

}  // namespace
