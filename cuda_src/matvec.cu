// Products with few activation rows (1 to 8): a warp has two weight rows, each lane the chains of both (see product.cuh).
//
// Weights are read and decoded once for all activation rows (row_product.cuh). COLUMNS of them are computed; those from count on repeat
// the last one and are not stored. From four columns on the compiler is given a whole multiprocessor's registers: it moves all columns'
// loads up, and with half of them it spills.
//
// matvec         y float32 [count, rows] = x W^T (+ bias); grid: rows / 16 blocks
// matvec_swiglu  W has interleaved rows (gate, up); activations out, int8: silu(gate) * up; grid: rows / 64 blocks
// matvec_parts   up to three matrices of different layouts, their outputs beside each other from column 0 on; grid: the sum of theirs
// matvec_swiglu_parts  gate and up of different layouts; grid: rows of one / 32 blocks
#include "strata.cuh"
#include "product.cuh"
#include "row_product.cuh"

// The 16 weight rows of one block.
template <class L, int COLUMNS>
__device__ __forceinline__ void store_rows(const Weights& w, int block, int rows, const Activations& x, int count, const float* bias, float* y,
                                           int y_width, int y_first) {
  int row0 = block * TILE_ROWS + 2 * warp_id(), row1 = min(row0 + 1, rows - 1);
  if (row0 >= rows) return;
  float sum[2][COLUMNS];
  dot_rows<L, COLUMNS>(w, x, count, row0, row1, sum);
  if (lane_id() != 0) return;
  for (int c = 0; c < COLUMNS; c++) {
    if (c < count) {
      float* to = y + (i64)c * y_width + y_first;
      to[row0] = bias ? sum[0][c] + bias[row0] : sum[0][c];
      if (row0 + 1 < rows) to[row1] = bias ? sum[1][c] + bias[row1] : sum[1][c];
    }
  }
}

template <class L, int COLUMNS>
__global__ void __launch_bounds__(THREADS, COLUMNS <= 2 ? 2 : 1) matvec(
    const u8* weight_codes, const u16* weight_scales, const u8* weight_steps, const u32* grid, float unit, int rows, int width,
    const i8* codes, const u32* meta, int count, const float* bias, int has_bias, float* y) {
  struct Shared { u32 grid[L::Codes::GRID]; };
  SHARED(Shared, shared);
  Weights w = {weight_codes, weight_scales, weight_steps, load_grid<L>(grid, shared.grid), unit, width};
  store_rows<L, COLUMNS>(w, blockIdx.x, rows, Activations{codes, meta, width}, count, has_bias ? bias : nullptr, y, rows, 0);
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
  swiglu_tile<COLUMNS>(shared.tile, has_bias ? bias : nullptr, has_bias ? bias + 1 : nullptr, 2, 0, count, out_codes, out_meta, out_width);
}

template <class A, class B, class C, int COLUMNS>
__global__ void __launch_bounds__(THREADS, COLUMNS <= 2 ? 2 : 1) matvec_parts(
    PART(0), PART(1), PART(2), const u32* grid, int width, const i8* codes, const u32* meta, int count, float* y, int y_width) {
  struct Shared { u32 grid[GRID_WORDS<A, B, C>]; };
  SHARED(Shared, shared);
  Activations x = {codes, meta, width};
  int block = blockIdx.x, second = tiles_of(rows0), third = second + tiles_of(rows1);
  if (block < second) {
    store_rows<A, COLUMNS>(WEIGHTS(0, A), block, rows0, x, count, BIAS(0), y, y_width, 0);
  } else if (block < third) {
    store_rows<B, COLUMNS>(WEIGHTS(1, B), block - second, rows1, x, count, BIAS(1), y, y_width, rows0);
  } else if constexpr (PRESENT<C>) {
    store_rows<C, COLUMNS>(WEIGHTS(2, C), block - third, rows2, x, count, BIAS(2), y, y_width, rows0 + rows1);
  }
}

template <class A, class B, int COLUMNS>
__global__ void __launch_bounds__(THREADS, COLUMNS <= 2 ? 2 : 1) matvec_swiglu_parts(
    PART(0), PART(1), const u32* grid, int width, const i8* codes, const u32* meta, int count, i8* out_codes, u32* out_meta, int out_width) {
  struct Shared { u32 grid[GRID_WORDS<A, B, none>]; float tile[COLUMNS][64]; };
  SHARED(Shared, shared);
  Activations x = {codes, meta, width};
  Weights gate = WEIGHTS(0, A), up = WEIGHTS(1, B);
  for (int step = 0; step < 32 / TILE_ROWS; step++) {
    int at = step * TILE_ROWS + 2 * warp_id(), row = blockIdx.x * 32 + at;
    float sum[2][COLUMNS];
    dot_rows<A, COLUMNS>(gate, x, count, row, row + 1, sum);
    if (lane_id() == 0)
      for (int c = 0; c < COLUMNS; c++) shared.tile[c][2 * at] = sum[0][c], shared.tile[c][2 * at + 2] = sum[1][c];
    dot_rows<B, COLUMNS>(up, x, count, row, row + 1, sum);
    if (lane_id() == 0)
      for (int c = 0; c < COLUMNS; c++) shared.tile[c][2 * at + 1] = sum[0][c], shared.tile[c][2 * at + 3] = sum[1][c];
  }
  __syncthreads();
  swiglu_tile<COLUMNS>(shared.tile, BIAS(0), BIAS(1), 1, 0, count, out_codes, out_meta, out_width);
}
