// Products with many activation rows (9 and more, prompts), on the matrix units; and all products with float16 weights.
//
// A block computes 16 weight rows for 8 * TILES activation rows (tile_product.cuh). Those from count on repeat the last one and are not
// stored.
//
// matmul         y float32 [count, rows] = x W^T (+ bias); grid: rows / 16 x count / (8 TILES)
// matmul_swiglu  W has interleaved rows (gate, up); activations out, int8: silu(gate) * up; grid: rows / 64 x count / (8 TILES)
// matmul_parts, matmul_swiglu_parts  as in matvec.cu
#include "strata.cuh"
#include "product.cuh"
#include "tile_product.cuh"

// The 16 weight rows of one block.
template <class L, int TILES, class Shared>
__device__ __forceinline__ void store_tile(const Weights& w, int block, int rows, const Activations& x, int count, const float* bias, float* y,
                                           int y_width, int y_first, Shared& shared) {
  int row = block * TILE_ROWS, first = blockIdx.y * 8 * TILES;
  multiply_tile<L, TILES, TILE_ROWS>(w, x, rows, row, first, count, shared.reduction, shared.tile, 0);
  for (int i = threadIdx.x; i < TILE_ROWS * 8 * TILES; i += THREADS) {
    int r = i % TILE_ROWS, c = i / TILE_ROWS;
    if (row + r < rows && first + c < count) {
      float sum = shared.tile[c][r];
      y[(i64)(first + c) * y_width + y_first + row + r] = bias ? sum + bias[row + r] : sum;
    }
  }
}

template <class L, int TILES>
__global__ void __launch_bounds__(THREADS, 1) matmul(
    const u8* weight_codes, const u16* weight_scales, const u8* weight_steps, const u32* grid, float unit, int rows, int width,
    const i8* codes, const u32* meta, int count, const float* bias, int has_bias, float* y) {
  struct Shared { u32 grid[L::Codes::GRID]; Reduction<TILES> reduction; float tile[8 * TILES][TILE_ROWS]; };
  SHARED(Shared, shared);
  Weights w = {weight_codes, weight_scales, weight_steps, load_grid<L>(grid, shared.grid), unit, width};
  store_tile<L, TILES>(w, blockIdx.x, rows, Activations{codes, meta, width}, count, has_bias ? bias : nullptr, y, rows, 0, shared);
}

template <class L, int TILES>
__global__ void __launch_bounds__(THREADS, 1) matmul_swiglu(
    const u8* weight_codes, const u16* weight_scales, const u8* weight_steps, const u32* grid, float unit, int rows, int width,
    const i8* codes, const u32* meta, int count, const float* bias, int has_bias, i8* out_codes, u32* out_meta, int out_width) {
  struct Shared { u32 grid[L::Codes::GRID]; Reduction<TILES> reduction; float tile[8 * TILES][64]; };
  SHARED(Shared, shared);
  Weights w = {weight_codes, weight_scales, weight_steps, load_grid<L>(grid, shared.grid), unit, width};
  int first = blockIdx.y * 8 * TILES;
  for (int step = 0; step < 64 / TILE_ROWS; step++) {
    int at = step * TILE_ROWS;
    multiply_tile<L, TILES, 64>(w, Activations{codes, meta, width}, rows, blockIdx.x * 64 + at, first, count, shared.reduction, shared.tile, at);
  }
  swiglu_tile<8 * TILES>(shared.tile, has_bias ? bias : nullptr, has_bias ? bias + 1 : nullptr, 2, first, count, out_codes, out_meta, out_width);
}

template <class A, class B, class C, int TILES>
__global__ void __launch_bounds__(THREADS, 1) matmul_parts(
    PART(0), PART(1), PART(2), const u32* grid, int width, const i8* codes, const u32* meta, int count, float* y, int y_width) {
  struct Shared { u32 grid[GRID_WORDS<A, B, C>]; Reduction<TILES> reduction; float tile[8 * TILES][TILE_ROWS]; };
  SHARED(Shared, shared);
  Activations x = {codes, meta, width};
  int block = blockIdx.x, second = tiles_of(rows0), third = second + tiles_of(rows1);
  if (block < second) {
    store_tile<A, TILES>(WEIGHTS(0, A), block, rows0, x, count, BIAS(0), y, y_width, 0, shared);
  } else if (block < third) {
    store_tile<B, TILES>(WEIGHTS(1, B), block - second, rows1, x, count, BIAS(1), y, y_width, rows0, shared);
  } else if constexpr (PRESENT<C>) {
    store_tile<C, TILES>(WEIGHTS(2, C), block - third, rows2, x, count, BIAS(2), y, y_width, rows0 + rows1, shared);
  }
}

template <class A, class B, int TILES>
__global__ void __launch_bounds__(THREADS, 1) matmul_swiglu_parts(
    PART(0), PART(1), const u32* grid, int width, const i8* codes, const u32* meta, int count, i8* out_codes, u32* out_meta, int out_width) {
  struct Shared { u32 grid[GRID_WORDS<A, B, none>]; Reduction<TILES> reduction; float tile[8 * TILES][64]; };
  SHARED(Shared, shared);
  Activations x = {codes, meta, width};
  Weights gate = WEIGHTS(0, A), up = WEIGHTS(1, B);
  int first = blockIdx.y * 8 * TILES;
  for (int step = 0; step < 32 / TILE_ROWS; step++) {
    int row = blockIdx.x * 32 + step * TILE_ROWS, at = 2 * step * TILE_ROWS;
    multiply_tile<A, TILES, 64>(gate, x, rows0, row, first, count, shared.reduction, shared.tile, at, 2);
    multiply_tile<B, TILES, 64>(up, x, rows1, row, first, count, shared.reduction, shared.tile, at + 1, 2);
  }
  swiglu_tile<8 * TILES>(shared.tile, BIAS(0), BIAS(1), 1, first, count, out_codes, out_meta, out_width);
}
