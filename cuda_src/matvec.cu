// Products with few activation rows (1 to 8): a warp has two weight rows, each lane the chains of both (see product.cuh).
//
// A lane loads a pair of groups of each weight row, decodes it once and multiplies it with all activation rows by dp4a, so that
// weights are read and decoded once for all of them. COLUMNS activation rows are computed; those from count on repeat the last
// one and are not stored. Two weight rows share the activations' loads, which are the larger half at one row. From four columns on the
// compiler is given a whole multiprocessor's registers: it moves all columns' loads up, and with half of them it spills.
//
// matvec         y float32 [count, y_width], columns y_first and on = x W^T (+ bias); grid: rows / 16 blocks
// matvec_swiglu  W has interleaved rows (gate, up); activations out, int8: silu(gate) * up; grid: rows / 64 blocks
#include "strata.cuh"
#include "product.cuh"

template <class L, int COLUMNS>
__device__ __forceinline__ void dot_rows(const Weights& w, const Activations& x, int count, i64 row0, i64 row1, float (&sum)[2][COLUMNS]) {
  for (int c = 0; c < COLUMNS; c++) sum[0][c] = sum[1][c] = 0.0f;
  int num_pairs = w.width / 64;
  for (int pair = lane_id(); pair < num_pairs; pair += CHAINS) {
    u32 words[2][16];
    Scale<L::HALVES> scales[2];
    L::Codes::whole(w, row0, pair, words[0]);
    L::Codes::whole(w, row1, pair, words[1]);
    L::Scales::get(w, row0, pair, scales[0]);
    L::Scales::get(w, row1, pair, scales[1]);
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
  for (int r = 0; r < 2; r++)
    for (int c = 0; c < COLUMNS; c++) sum[r][c] = warp_sum(sum[r][c]);
}

template <class L, int COLUMNS>
__global__ void __launch_bounds__(THREADS, COLUMNS <= 2 ? 2 : 1) matvec(
    const u8* weight_codes, const u16* weight_scales, const u8* weight_steps, const u32* grid, float unit, int rows, int width,
    const i8* codes, const u32* meta, int count, const float* bias, int has_bias, float* y, int y_width, int y_first) {
  struct Shared { u32 grid[L::Codes::GRID]; };
  SHARED(Shared, shared);
  Weights w = {weight_codes, weight_scales, weight_steps, load_grid<L>(grid, shared.grid), unit, width};
  int row0 = blockIdx.x * TILE_ROWS + 2 * warp_id(), row1 = min(row0 + 1, rows - 1);
  if (row0 >= rows) return;
  float sum[2][COLUMNS];
  dot_rows<L, COLUMNS>(w, Activations{codes, meta, width}, count, row0, row1, sum);
  if (lane_id() != 0) return;
  for (int c = 0; c < COLUMNS; c++) {
    if (c < count) {
      float* to = y + (i64)c * y_width + y_first;
      to[row0] = has_bias ? sum[0][c] + bias[row0] : sum[0][c];
      if (row0 + 1 < rows) to[row1] = has_bias ? sum[1][c] + bias[row1] : sum[1][c];
    }
  }
}

template <class L, int COLUMNS>
__global__ void __launch_bounds__(THREADS, COLUMNS <= 2 ? 2 : 1) matvec_swiglu(
    const u8* weight_codes, const u16* weight_scales, const u8* weight_steps, const u32* grid, float unit, int rows, int width,
    const i8* codes, const u32* meta, int count, const float* bias, int has_bias, i8* out_codes, u32* out_meta, int out_width) {
  struct Shared { u32 grid[L::Codes::GRID]; float tile[COLUMNS][64]; };
  SHARED(Shared, shared);
  Weights w = {weight_codes, weight_scales, weight_steps, load_grid<L>(grid, shared.grid), unit, width};
  for (int step = 0; step < 64 / TILE_ROWS; step++) {
    int at = step * TILE_ROWS + 2 * warp_id();
    float sum[2][COLUMNS];
    dot_rows<L, COLUMNS>(w, Activations{codes, meta, width}, count, blockIdx.x * 64 + at, blockIdx.x * 64 + at + 1, sum);
    if (lane_id() == 0)
      for (int c = 0; c < COLUMNS; c++) shared.tile[c][at] = sum[0][c], shared.tile[c][at + 1] = sum[1][c];
  }
  __syncthreads();
  swiglu_tile<COLUMNS>(shared.tile, has_bias ? bias : nullptr, 0, count, out_codes, out_meta, out_width);
}
