// Products of two weight rows with a few activation rows, a lane for each chain of product.cuh.
//
// A lane loads a pair of groups of each weight row, decodes it once and multiplies it with all activation rows by dp4a. Two weight rows
// share the activations' loads, which are the larger half at one row. A row of few pairs leaves lanes without work: LANES of them (no fewer
// than the row has pairs) then make a product of their own, and a warp has several. The chains that are not there would have added zeros.
#pragma once

// The sum of each LANES neighbouring lanes, in the order of warp_sum.
template <int LANES> __device__ __forceinline__ float lanes_sum(float value) {
  if (LANES == WARP) return warp_sum(value);
  for (int step = 1; step < LANES; step *= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
  return value;
}

// Adds one pair of groups of both weight rows, times all activation rows.
template <class L, int COLUMNS>
__device__ __forceinline__ void add_row_pair(const Weights& w, const Activations& x, int count, i64 row0, i64 row1, int pair,
                                             float (&sum)[2][COLUMNS]) {
  u32 words[2][16];
  Scale<L::HALVES> scales[2];
  L::Scales::get(w, row0, pair, scales[0]);
  L::Scales::get(w, row1, pair, scales[1]);
  L::Codes::whole(w, row0, pair, words[0]);
  L::Codes::whole(w, row1, pair, words[1]);
  for (int c = 0; c < COLUMNS; c++) {
    int column = min(c, count - 1);
    const uint4* codes = (const uint4*)x.row_codes(column) + 4 * pair;
    uint4 meta = x.row_meta(column)[pair];
    for (int group = 0; group < 2; group++) {
      uint4 low = codes[2 * group], high = codes[2 * group + 1];
      u32 u[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float scale = bits_float(group ? meta.z : meta.x);
      u32 sums = group ? meta.w : meta.y;
      for (int r = 0; r < 2; r++) {
        for (int h = 0; h < L::HALVES; h++) {
          constexpr int words_of_half = 8 / L::HALVES;
          int dot = 0;
          for (int i = 0; i < words_of_half; i++) dot = dot4(words[r][8 * group + h * words_of_half + i], u[h * words_of_half + i], dot);
          int at = group * L::HALVES + h;
          sum[r][c] = accumulate<L>(sum[r][c], dot, sums, h, scales[r].scale[at], L::AFFINE ? scales[r].offset[at] : 0.0f, scale);
        }
      }
    }
  }
}

// Fewer LANES than chains have one pair each at most: a loop would make the compiler load several pairs ahead.
template <class L, int COLUMNS, int LANES = CHAINS>
__device__ __forceinline__ void dot_rows(const Weights& w, const Activations& x, int count, i64 row0, i64 row1, float (&sum)[2][COLUMNS]) {
  for (int c = 0; c < COLUMNS; c++) sum[0][c] = sum[1][c] = 0.0f;
  int num_pairs = w.width / 64, pair = lane_id() % LANES;
  if constexpr (LANES < CHAINS) {
    if (pair < num_pairs) add_row_pair<L, COLUMNS>(w, x, count, row0, row1, pair, sum);
  } else {
    for (; pair < num_pairs; pair += CHAINS) add_row_pair<L, COLUMNS>(w, x, count, row0, row1, pair, sum);
  }
  for (int r = 0; r < 2; r++)
    for (int c = 0; c < COLUMNS; c++) sum[r][c] = lanes_sum<LANES>(sum[r][c]);
}
