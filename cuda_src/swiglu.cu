// silu(gate) * up of rows [gate | up], quantised: for models whose gate and up matrices are stored in different layouts, so that no
// product can end with it (matvec_swiglu, matmul_swiglu).
//
// gate_up float32 [rows, 2 columns], the gate first; out: activations, columns a multiple of 32. A warp per group of 32.
#include "strata.cuh"
#include "product.cuh"

__global__ void __launch_bounds__(THREADS) swiglu(const float* gate_up, int columns, int width, i8* codes, u32* meta) {
  int group = blockIdx.x * num_warps() + warp_id();
  if (group >= columns / 32) return;
  i64 row = blockIdx.y;
  const float* gate = gate_up + row * 2 * columns + 32 * group + lane_id();
  quantize_group(silu(gate[0]) * gate[columns], codes + row * width + 32 * group, meta + (row * (width / 32) + group) * 2);
}
