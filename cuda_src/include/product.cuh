// The order of every product: y[row] = sum over k of weight[row][k] * x[k], for any number of activation rows, on any path.
//
//   group   32 weights (16 where a scale group has 16): an exact int32 dot product, then accumulate() in layouts.cuh
//   pair    two groups; pair p belongs to chain p % 32
//   chain   a float sum from 0, over its pairs from the first to the last, groups in order
//   total   the tree over the 32 chains: adjacent chains, then adjacent pairs of chains, and so on
// One path gives a lane to each chain (matvec.cu), the other four chains to each of eight warps (matmul.cu); a row's bits depend on
// neither, nor on the other rows, because nothing else is ever added.
#pragma once

#include "activations.cuh"
#include "layouts.cuh"

constexpr int CHAINS = 32;
constexpr int THREADS = 256;
constexpr int TILE_ROWS = 16;  // weight rows of a block's step

// Kernels that multiply several matrices in one launch (_parts) take each as these parameters. What they do for a block of one of them
// is what the kernel for one matrix does, so a launch for three gives the bits of three launches.
#define PART(n)                                                                                                             \
  const u8 *weight_codes##n, const u16 *weight_scales##n, const u8 *weight_steps##n, float unit##n, int rows##n, const float *bias##n, \
      int has_bias##n
#define WEIGHTS(n, L) Weights{weight_codes##n, weight_scales##n, weight_steps##n, load_grid<L>(grid, shared.grid), unit##n, width}
#define BIAS(n) (has_bias##n ? bias##n : nullptr)

template <class A, class B, class C> constexpr int GRID_WORDS = A::Codes::GRID + B::Codes::GRID + C::Codes::GRID > 3 ? 512 : 1;

__device__ __forceinline__ int tiles_of(int rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// Ends a block that has the products of 64 interleaved rows in shared memory, gate (even) and up (odd) of 32 neighbouring
// outputs: hidden = silu(gate) * up, quantised. tile: [columns][64]. Biases: null, or one for each output, ``stride`` apart.
// Column c is output row places[c], or without places first + c; those from count on are not stored.
template <int COLUMNS>
__device__ __forceinline__ void swiglu_tile(const float (&tile)[COLUMNS][64], const float* gate_bias, const float* up_bias, int stride, int first,
                                            int count, i8* codes, u32* meta, int width, const int* places = nullptr) {
  int lane = lane_id(), output = blockIdx.x * 32 + lane;
  for (int column = warp_id(); column < COLUMNS && first + column < count; column += num_warps()) {
    float gate = tile[column][2 * lane], up = tile[column][2 * lane + 1];
    if (gate_bias) gate += gate_bias[stride * output];
    if (up_bias) up += up_bias[stride * output];
    i64 row = places ? places[column] : first + column;
    quantize_group(silu(gate) * up, codes + row * width + blockIdx.x * 32, meta + (row * (width / 32) + blockIdx.x) * 2);
  }
}
