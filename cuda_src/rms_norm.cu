// RMSNorm with what comes before it (the residual sum) and after it (int8 quantisation), so that no float row is stored twice.
//
//   hidden[row] += delta[row]                        where ADD, in place
//   y = hidden[row] / sqrt(mean(hidden^2) + eps) * gamma, quantised into codes and meta (activations.cuh), padding included
//   floats[row] = y                                  where FLOATS: for a draft block, which takes hidden rows as they are
// One block of 256 threads per output row i; row = rows[i], so that the last norm takes the rows that need logits alone. Where ADD, no row
// is named twice.
// Order of the sum of squares: thread t adds elements t, t + 256, ...; then block_sum.
#include "strata.cuh"
#include "activations.cuh"

template <bool ADD, bool FLOATS = false>
__global__ void __launch_bounds__(256) rms_norm(const int* rows, float* hidden, const float* delta, const float* gamma, float eps,
                                                int columns, int width, i8* codes, u32* meta, float* floats) {
  struct Shared { float per_warp[8]; };
  SHARED(Shared, shared);
  i64 from = (i64)rows[blockIdx.x] * columns, to = blockIdx.x;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    float x = hidden[from + i];
    if (ADD) hidden[from + i] = x = x + delta[from + i];
    sum += x * x;
  }
  float scale = 1.0f / sqrtf(block_sum(sum, shared.per_warp) / (float)columns + eps);
  for (int group = warp_id(); group < width / 32; group += num_warps()) {
    int i = 32 * group + lane_id();
    float y = i < columns ? hidden[from + i] * scale * gamma[i] : 0.0f;
    if (FLOATS && i < columns) floats[from + i] = y;
    quantize_group(y, codes + to * width + 32 * group, meta + (to * (width / 32) + group) * 2);
  }
}
