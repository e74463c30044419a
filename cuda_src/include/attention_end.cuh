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

// Folds the partial results of all splits of this tile's row, in rising order, by the same operations as a block folds its own.
template <int HD, int COLUMNS, bool F16>
__device__ __forceinline__ void fold_partials(const float* partial, int columns, int splits, int max_splits, Shared<HD, COLUMNS, F16>& shared) {
  for (int work = threadIdx.x; work < columns * HD; work += THREADS) {
    int column = work / HD, dim = work % HD;
    const float* from = partial + (i64)column * max_splits * (HD + 2);
    float m = -INFINITY, l = 0.0f, acc = 0.0f;
    for (int split = 0; split < splits; split++, from += HD + 2) {
      float largest = load_fresh(from + HD), now = fmaxf(m, largest);
      float keep = expf(m - now), add = expf(largest - now);
      l = l * keep + load_fresh(from + HD + 1) * add;
      acc = acc * keep + load_fresh(from + dim) * add;
      m = now;
    }
    shared.scores[column][dim] = acc / l;
  }
}
