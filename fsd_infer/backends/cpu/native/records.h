// Records of weights in blocks: written from the rows of a file, and read number by number. Rows of packed weights.
#pragma once

#include "blocks.h"
#include "interface.h"

namespace {

// One block of a row of a file, unpacked.
struct Record {
  uint8_t codes[256], scales[16], least[16];  // scales and least: of types with several runs
  uint16_t d, m;
};

uint16_t halfword(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

// Unpack a block from a row. Returns its bytes. Rows of IQ2_XXS come as codebooks.py rewrites them.
int read_record(int64_t kind, const uint8_t* from, Record& to) {
  const uint8_t* p = from;
  if (kind == IQ2_XXS) {  // d, the integers of the runs, codes
    to.d = halfword(p), to.m = 0;
    std::memcpy(to.scales, p + 2, 8);
    for (int k = 0; k < 256; ++k) to.codes[k] = p[10 + k / 2] >> (k % 2 * 4) & 15;
    return 138;
  }
  if (kind == Q2_K) {  // 84 bytes
    for (int run = 0; run < 16; ++run) to.scales[run] = p[run] & 15, to.least[run] = p[run] >> 4;
    for (int k = 0; k < 256; ++k) to.codes[k] = p[16 + k / 128 * 32 + k % 32] >> (k / 32 % 4 * 2) & 3;
    to.d = halfword(p + 80), to.m = halfword(p + 82);
    return 84;
  }
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
  int low_bit = 0, high_bit = 0;
  Place(int k, int column) {
    const int quad = k % 32 / 4, lane = column * 4 + k % 4;
    const int64_t step = k / 32 * F::STEP;
    low = step + (F::BITS == 8 ? quad : quad / 2) * 64 + lane;
    if (F::BITS < 8) low_bit = quad % 2 * 4;
    high = step + 256 + quad / F::PLANE * 64 + lane, high_bit = quad % F::PLANE * F::MORE;
  }
};

template <class F>
void put(const Record& from, int column, uint8_t* record) {
  for (int k = 0; k < F::SPAN; ++k) {
    const Place<F> at(k, column);
    record[at.low] |= (uint8_t)((F::BITS == 8 ? from.codes[k] : from.codes[k] & 15) << at.low_bit);
    if (F::MORE) record[at.high] |= (uint8_t)(from.codes[k] >> 4 << at.high_bit);
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
    if (F::MORE) code |= (record[at.high] >> at.high_bit & ((1 << F::MORE) - 1)) << 4;
    if (F::TABLE) code = VALUES[code];
    y[k] = ds[column] * (float)(code - F::BIAS) + ms[column];
  }
}

// y [depth], in bf16 or fp32 = row `id` of a weight in blocks, or of one in bf16.
template <class Number>
void read_row(const fsd_linear& layer, int64_t id, Number* y) {
  const int64_t side = layer.side, depth = layer.depth;
  const bool blocks = with_form(layer.kind, [&](auto form) {
    using F = decltype(form);
    const uint8_t* record = (const uint8_t*)layer.panels + id / LANES * (depth / F::SPAN) * F::RECORD;
    alignas(64) float values[F::SPAN];
    for (int64_t at = 0; at < depth; at += F::SPAN, record += F::RECORD) {
      get<F>(record, (int)(id % LANES), values);
      for (int k = 0; k < F::SPAN; k += LANES) store(y + at + k, _mm512_load_ps(values + k));
    }
  });
  if (blocks) return;
  const bf16* const first = (const bf16*)layer.panels + id / side * side * depth + id % side * 2;
  for (int64_t k = 0; k < depth; ++k) {
    const uint32_t number = first[k / 2 * 2 * side + k % 2];
    if constexpr (sizeof(Number) == sizeof(bf16)) {
      y[k] = (bf16)number;
    } else {
      const uint32_t bits = number << 16;
      std::memcpy(y + k, &bits, sizeof bits);
    }
  }
}

}  // namespace
