// What a draft block has besides a decoder layer: its input, and hidden rows that are handed from window to window.
//
// store float32 [any, columns]: hidden rows after a norm: a window's, the last of each page, those kept for later. They are named by number.
//
// join_norms: activations [rows, 2 columns] = RMSNorm(embedding[i]) * enorm, then RMSNorm(store[sources[i]]) * hnorm; zeros for a source
//   below 0 (the first token of a text has no hidden row before it). Sums of squares in the order of rms_norm.cu. All of a row is written,
//   padding included. Grid: a block of 256 per row.
// move_rows: store[moves[i].to] = store[moves[i].from], in no order: no row is both. int32 [count, 2]; below 0: nothing is done. Grid: a
//   block of 256 per move.
// clear: bytes offset .. offset + count - 1 of each of gridDim.x lines, stride bytes apart, become 0: what a draft reads without ever having
//   written it must be finite. All are multiples of 4. Grid: a block of 256 per line.
#include "strata.cuh"
#include "activations.cuh"

__device__ __forceinline__ float norm_scale(const float* row, int columns, float eps, float* per_warp) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += row[i] * row[i];
  return 1.0f / sqrtf(block_sum(sum, per_warp) / (float)columns + eps);
}

__global__ void __launch_bounds__(256) join_norms(const float* embedding, const float* store, const int* sources, const float* enorm,
                                                  const float* hnorm, float eps, int columns, int width, i8* codes, u32* meta) {
  struct Shared { float per_warp[8]; };
  SHARED(Shared, shared);
  i64 row = blockIdx.x;
  int source = sources[row];
  const float* left = embedding + row * columns;
  const float* right = store + (i64)max(source, 0) * columns;
  float left_scale = norm_scale(left, columns, eps, shared.per_warp), right_scale = norm_scale(right, columns, eps, shared.per_warp);
  for (int group = warp_id(); group < width / 32; group += num_warps()) {
    int i = 32 * group + lane_id(), j = i - columns;
    float y = 0.0f;
    if (i < columns) y = left[i] * left_scale * enorm[i];
    else if (j < columns && source >= 0) y = right[j] * right_scale * hnorm[j];
    quantize_group(y, codes + row * width + 32 * group, meta + (row * (width / 32) + group) * 2);
  }
}

__global__ void __launch_bounds__(256) move_rows(float* store, const int* moves, int columns) {
  int from = moves[2 * blockIdx.x], to = moves[2 * blockIdx.x + 1];
  if (from < 0 || to < 0) return;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) store[(i64)to * columns + i] = store[(i64)from * columns + i];
}

__global__ void __launch_bounds__(256) clear(i8* base, i64 stride, i64 offset, i64 count) {
  u32* line = (u32*)(base + blockIdx.x * stride + offset);
  for (i64 i = threadIdx.x; i < count / 4; i += blockDim.x) line[i] = 0;
}
