// The end of an attention block: results out as activations, or as a partial result that the last block folds (see attention.cu).
#pragma once

// shared.scores[column][dim] holds finished results: quantised, columns of this tile only.
template <int HD, int COLUMNS, bool F16>
__device__ __forceinline__ void write_results(const Request& q, int columns, Shared<HD, COLUMNS, F16>& shared, i8* codes, u32* meta, int width) {
  for (int work = warp_id(); work < columns * (HD / 32); work += WARPS) {
    int column = work / (HD / 32), group = work % (HD / 32);
    i64 row = q.row_of(column);
    int at = q.head_of(column) * HD + 32 * group;
    quantize_group(shared.scores[column][32 * group + lane_id()], codes + row * width + at, meta + (row * width + at) / 32 * 2);
  }
}

// Calls visit(column, dim, value of acc) for every element that this thread has.
template <int HD, int COLUMNS, class Visit>
__device__ __forceinline__ void for_each(float (&acc)[(HD + 63) / 64][COLUMNS / 8][4], Visit visit) {
  int lane = lane_id(), g = lane / 4, t = lane % 4;
  for (int tile = 0; tile < (HD + 63) / 64; tile++)
    for (int n = 0; n < COLUMNS / 8; n++)
      for (int i = 0; i < 4; i++) {
        int dim = 16 * (warp_id() + WARPS * tile) + g + 8 * (i / 2);
        if (dim < HD) visit(8 * n + 2 * t + i % 2, dim, acc[tile][n][i]);
      }
}

// The largest of the values of this lane and those before it.
__device__ __forceinline__ float running_max(float value) {
  for (int step = 1; step < WARP; step *= 2) value = fmaxf(value, __shfl_up_sync(ALL_LANES, value, step));
  return value;
}

// Folds the partial results of all splits of this tile's row, in rising order, by the same operations as a block folds its own.
//
// First, for 32 splits at once, what sums are multiplied with: a lane has a split, those that are left over the last one (a largest score is
// the same in whatever order it is found).
// Then each thread adds up its dimensions. Were it one loop, exponentials would take most of its time, again for every dimension.
template <int HD, int COLUMNS, bool F16>
__device__ __forceinline__ void fold_partials(const float* partial, int columns, int splits, int max_splits, Shared<HD, COLUMNS, F16>& shared) {
  int lane = lane_id();
  for (int c = threadIdx.x; c < columns; c += THREADS) shared.m[c] = -INFINITY, shared.l[c] = 0.0f;
  __syncthreads();
  for (int base = 0; base < splits; base += WARP) {
    int count = min(WARP, splits - base);
    for (int column = warp_id(); column < columns; column += WARPS) {
      const float* from = partial + ((i64)column * max_splits + base + min(lane, count - 1)) * (HD + 2) + HD;
      float largest = load_fresh(from), sum = load_fresh(from + 1), before = shared.m[column], l = shared.l[column];
      float now = running_max(fmaxf(before, largest)), earlier = __shfl_up_sync(ALL_LANES, now, 1);
      float keep = expf((lane > 0 ? earlier : before) - now), add = expf(largest - now);
      for (int i = 0; i < count; i++)
        l = l * __shfl_sync(ALL_LANES, keep, i) + __shfl_sync(ALL_LANES, sum, i) * __shfl_sync(ALL_LANES, add, i);
      shared.keeps[column][lane] = keep;
      shared.adds[column][lane] = add;
      if (lane == WARP - 1) shared.m[column] = now, shared.l[column] = l;
    }
    __syncthreads();
    for (int work = threadIdx.x; work < columns * HD; work += THREADS) {
      int column = work / HD, dim = work % HD;
      const float* from = partial + ((i64)column * max_splits + base) * (HD + 2) + dim;
      float acc = base > 0 ? shared.scores[column][dim] : 0.0f;
#pragma unroll 8
      for (int i = 0; i < count; i++) acc = acc * shared.keeps[column][i] + load_fresh(from + i * (HD + 2)) * shared.adds[column][i];
      shared.scores[column][dim] = base + count < splits ? acc : acc / shared.l[column];
    }
    __syncthreads();
  }
}
