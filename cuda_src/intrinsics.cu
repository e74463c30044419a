// One thread block that runs every intrinsic of include/, so that the device's and the host's bodies can be compared bit for bit.
//
// in: 32 lanes x 8 words of any bits. out: 32 lanes x 24 words, in the order below. The host's bodies are checked against NumPy
// in tests/kernels/test_intrinsics.py, and the device's against the same NumPy code where there is a GPU.
#include "strata.cuh"

__global__ void intrinsics(const u32* in, u32* out) {
  struct Shared { float per_warp[1]; };
  SHARED(Shared, shared);
  int lane = lane_id();
  const u32* x = in + 8 * lane;
  u32* y = out + 24 * lane;
  float small = (float)(int)(x[0] % 2001) - 1000.0f;

  y[0] = float_bits(half_to_float((u16)x[0]));
  y[1] = float_to_half(bits_float(x[1]));
  y[2] = dot4(x[0], x[1], x[2]);
  y[3] = round_to_int(small * 0.125f);
  y[4] = top_bit_masks(x[0]);
  y[5] = __umulhi(x[0], x[1]);
  y[6] = __popc(x[0]);
  y[7] = __ballot_sync(ALL_LANES, x[0] & 1);
  y[8] = __shfl_sync(ALL_LANES, x[0], 5);
  y[9] = __shfl_xor_sync(ALL_LANES, x[0], 6);
  y[10] = __shfl_up_sync(ALL_LANES, x[0], 3);
  y[11] = __shfl_down_sync(ALL_LANES, x[0], 3);
  y[12] = float_bits(warp_sum(small * 1.1f));
  y[13] = float_bits(warp_max(small));
  y[14] = warp_sum((int)x[0]);
  y[15] = float_bits(block_sum(small * 1.1f, shared.per_warp));

  u32 a[4] = {x[0], x[1], x[2], x[3]}, b[2] = {x[4], x[5]};
  int c32[4] = {1, 2, 3, 4}, c16[4] = {1, 2, 3, 4};
  mma_s8_k32(c32, a, b);
  mma_s8_k16(c16, a[0], a[1], b[0]);
  for (int i = 0; i < 4; i++) y[16 + i] = c32[i] + 65536 * c16[i];

  u32 fa[4], fb[2];  // halves of -2 .. 2 in steps of 1/4: products and sums are exact in any order
  for (int i = 0; i < 6; i++) {
    u32 low = float_to_half((float)((int)(x[i] & 15) - 8) * 0.25f), high = float_to_half((float)((int)(x[i] >> 8 & 15) - 8) * 0.25f);
    (i < 4 ? fa[i] : fb[i - 4]) = low | high << 16;
  }
  float cf[4] = {1, 2, 3, 4};
  mma_f16_k16(cf, fa, fb);
  for (int i = 0; i < 4; i++) y[20 + i] = float_bits(cf[i]);
}
