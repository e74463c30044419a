// Rows of the embedding matrix, from any layout: y float32 [count, columns], y[i] = weights[tokens[i]].
//
// One block per row, a lane per pair of groups. The value is rounded as the file's decoder rounds it: scale * (MUL * code + ADD) is
// exact, adding the offset rounds once.
#include "strata.cuh"
#include "activations.cuh"
#include "layouts.cuh"

template <class L> __device__ __forceinline__ void expand_pair(const Weights& w, i64 row, int pair, float* y, int columns) {
  u32 words[16];
  Scale<L::HALVES> s;
  L::Codes::whole(w, row, pair, words);
  L::Scales::get(w, row, pair, s);
#pragma unroll
  for (int i = 0; i < 64; i++) {
    if (64 * pair + i >= columns) break;
    int at = i / (32 / L::HALVES), code = L::MUL * (i8)(words[i / 4] >> (8 * (i % 4))) + L::ADD;
    float value = s.scale[at] * (float)code;
    y[64 * pair + i] = L::AFFINE ? value + s.offset[at] : value;
  }
}

template <class L>
__global__ void __launch_bounds__(256) embed(
    const u8* weight_codes, const u16* weight_scales, const u8* weight_steps, const u32* grid, float unit, int rows, int width,
    const int* tokens, int columns, float* y) {
  struct Shared { u32 grid[L::Codes::GRID]; };
  SHARED(Shared, shared);
  Weights w = {weight_codes, weight_scales, weight_steps, load_grid<L>(grid, shared.grid), unit, width};
  i64 row = min(max(tokens[blockIdx.x], 0), rows - 1);
  float* to = y + (i64)blockIdx.x * columns;
  if constexpr (L::FLOATS) {
    const u16* from = (const u16*)(weight_codes + row * 2 * width);
    for (int i = threadIdx.x; i < columns; i += blockDim.x) to[i] = half_to_float(from[i]);
  } else {
    for (int pair = threadIdx.x; pair < width / 64; pair += blockDim.x) expand_pair<L>(w, row, pair, to, columns);
  }
}
