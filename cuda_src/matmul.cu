// Products with many activation rows (9 and more, prompts), on the matrix units; and all products with float16 weights.
//
// A block computes 16 weight rows for 8 * TILES activation rows: eight warps share K, warp w has chains 4w .. 4w + 3 of product.cuh,
// so its sums are exactly the lanes' of matvec.cu, and the tree over chains is finished in shared memory. Weights are A (rows g, g + 8
// of lane 4g + t), activations B (column g), products C (rows g, g + 8, columns 2t, 2t + 1). The k slots of a fragment are permuted so
// that a lane's weights lie together; the activations' words are picked the same way, and an integer sum does not care.
// Activation rows from count on repeat the last one and are not stored.
//
// matmul         y float32 [count, y_width], columns y_first and on = x W^T (+ bias); grid: rows / 16 x count / (8 TILES)
// matmul_swiglu  W has interleaved rows (gate, up); activations out, int8: silu(gate) * up; grid: rows / 64 x count / (8 TILES)
// matmul_parts, matmul_swiglu_parts  as in matvec.cu
#include "strata.cuh"
#include "product.cuh"

constexpr int WARPS = THREADS / WARP;
constexpr int OWN_CHAINS = CHAINS / WARPS;

template <int TILES> struct Reduction { float of_warp[WARPS][TILE_ROWS][8 * TILES]; };

// sums[i]: element i of C. Adds one pair's groups; row0, row1: the weight rows of this lane; column: of B.
template <class L, int TILES>
__device__ __forceinline__ void add_pair(const Weights& w, const Activations& x, int pair, i64 row0, i64 row1, int first, int count,
                                         float (&sums)[TILES][4]) {
  int lane = lane_id(), g = lane / 4, t = lane % 4;
  u32 upper[4], lower[4];
  Scale<L::HALVES> scales[2];
  L::Codes::part(w, row0, pair, t, upper);
  L::Codes::part(w, row1, pair, t, lower);
  L::Scales::get(w, row0, pair, scales[0]);
  L::Scales::get(w, row1, pair, scales[1]);
  for (int tile = 0; tile < TILES; tile++) {
    const u32* codes = x.row_codes(min(first + 8 * tile + g, count - 1)) + 16 * pair;
    uint4 meta[2];
    for (int i = 0; i < 2; i++) meta[i] = x.row_meta(min(first + 8 * tile + 2 * t + i, count - 1))[pair];
    for (int group = 0; group < 2; group++) {
      for (int h = 0; h < L::HALVES; h++) {
        int c[4] = {0, 0, 0, 0};
        if (L::HALVES == 1) {
          u32 a[4] = {upper[2 * group], lower[2 * group], upper[2 * group + 1], lower[2 * group + 1]};
          u32 b[2] = {codes[8 * group + 2 * t], codes[8 * group + 2 * t + 1]};
          mma_s8_k32(c, a, b);
        } else {
          mma_s8_k16(c, upper[2 * group + h], lower[2 * group + h], codes[8 * group + 4 * h + t]);
        }
        for (int i = 0; i < 4; i++) {
          const uint4& m = meta[i % 2];
          const Scale<L::HALVES>& s = scales[i / 2];
          int at = group * L::HALVES + h;
          sums[tile][i] = accumulate<L>(sums[tile][i], c[i], group ? m.w : m.y, h, s.scale[at], L::AFFINE ? s.offset[at] : 0.0f,
                                        bits_float(group ? m.z : m.x));
        }
      }
    }
  }
}

// The same for float16 weights: a group's codes are exact as fp16, its 32 products are summed by the matrix unit, then scaled.
template <int TILES>
__device__ __forceinline__ void add_pair_of_halves(const Weights& w, const Activations& x, int pair, i64 row0, i64 row1, int first, int count,
                                                   float (&sums)[TILES][4]) {
  int lane = lane_id(), g = lane / 4, t = lane % 4;
  for (int group = 0; group < 2; group++) {
    uint4 upper = ((const uint4*)(w.codes + row0 * 2 * w.width))[8 * pair + 4 * group + t];
    uint4 lower = ((const uint4*)(w.codes + row1 * 2 * w.width))[8 * pair + 4 * group + t];
    for (int tile = 0; tile < TILES; tile++) {
      const u32* codes = x.row_codes(min(first + 8 * tile + g, count - 1)) + 16 * pair + 8 * group + 2 * t;
      float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      u32 b[2];
      bytes_to_halves(codes[0], b[0], b[1]);
      u32 a[4] = {upper.x, lower.x, upper.y, lower.y};
      mma_f16_k16(c, a, b);
      bytes_to_halves(codes[1], b[0], b[1]);
      u32 rest[4] = {upper.z, lower.z, upper.w, lower.w};
      mma_f16_k16(c, rest, b);
      for (int i = 0; i < 4; i++) {
        uint4 meta = x.row_meta(min(first + 8 * tile + 2 * t + i % 2, count - 1))[pair];
        sums[tile][i] = fmaf(bits_float(group ? meta.z : meta.x), c[i], sums[tile][i]);
      }
    }
  }
}

// 16 weight rows from row on, times activation rows first .. first + 8 TILES - 1, into to[column][at + step * row]. All threads take part.
template <class L, int TILES, int STRIDE>
__device__ __forceinline__ void multiply_tile(const Weights& w, const Activations& x, int rows, int row, int first, int count,
                                              Reduction<TILES>& shared, float (&to)[8 * TILES][STRIDE], int at, int step = 1) {
  int lane = lane_id(), g = lane / 4, t = lane % 4, warp = warp_id();
  int row0 = min(row + g, rows - 1), row1 = min(row + g + 8, rows - 1), num_pairs = w.width / 64;
  float chains[OWN_CHAINS][TILES][4];
  for (int chain = 0; chain < OWN_CHAINS; chain++)
    for (int tile = 0; tile < TILES; tile++)
      for (int i = 0; i < 4; i++) chains[chain][tile][i] = 0.0f;
  for (int base = OWN_CHAINS * warp; base < num_pairs; base += CHAINS) {
#pragma unroll
    for (int chain = 0; chain < OWN_CHAINS; chain++) {
      if (base + chain < num_pairs) {
        if constexpr (L::FLOATS) add_pair_of_halves<TILES>(w, x, base + chain, row0, row1, first, count, chains[chain]);
        else add_pair<L, TILES>(w, x, base + chain, row0, row1, first, count, chains[chain]);
      }
    }
  }
  for (int tile = 0; tile < TILES; tile++)
    for (int i = 0; i < 4; i++) {
      float sum = (chains[0][tile][i] + chains[1][tile][i]) + (chains[2][tile][i] + chains[3][tile][i]);
      shared.of_warp[warp][g + 8 * (i / 2)][8 * tile + 2 * t + i % 2] = sum;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < TILE_ROWS * 8 * TILES; i += THREADS) {
    int r = i % TILE_ROWS, c = i / TILE_ROWS;
    float level[WARPS];
    for (int v = 0; v < WARPS; v++) level[v] = shared.of_warp[v][r][c];
    to[c][at + step * r] = ((level[0] + level[1]) + (level[2] + level[3])) + ((level[4] + level[5]) + (level[6] + level[7]));
  }
  __syncthreads();
}

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
    const i8* codes, const u32* meta, int count, const float* bias, int has_bias, float* y, int y_width, int y_first) {
  struct Shared { u32 grid[L::Codes::GRID]; Reduction<TILES> reduction; float tile[8 * TILES][TILE_ROWS]; };
  SHARED(Shared, shared);
  Weights w = {weight_codes, weight_scales, weight_steps, load_grid<L>(grid, shared.grid), unit, width};
  store_tile<L, TILES>(w, blockIdx.x, rows, Activations{codes, meta, width}, count, has_bias ? bias : nullptr, y, y_width, y_first, shared);
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
