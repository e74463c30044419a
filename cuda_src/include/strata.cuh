// What every kernel includes: integer names and one set of intrinsics with two bodies, device and host.
//
// The same .cu is compiled by NVRTC for a GPU and, with STRATA_HOST defined, by a C++ compiler for the emulated device.
// Rules that keep one source true on both (a test executes them, the lint compiles them for every architecture):
//   - no standard headers, no inline PTX and no fp16 arithmetic outside include/; shapes are int, offsets long long
//   - shared memory is one struct per kernel, declared by SHARED(Type, name): the emulator poisons it before each block
//   - blocks have one dimension and a multiple of 32 threads; every lane reaches every warp operation and every barrier
//   - no block waits for another one; integer atomics only, so that no sum depends on timing
//   - floating point contraction is off in both compilers: a fused multiply-add is written fmaf, and nothing else is one
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

#ifdef STRATA_HOST
#include "host.cuh"
#else
#include "device.cuh"
#endif

__device__ __forceinline__ int lane_id() { return threadIdx.x % WARP; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / WARP; }
__device__ __forceinline__ int num_warps() { return blockDim.x / WARP; }

__device__ __forceinline__ int pack_bytes(int a, int b, int c, int d) {
  return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (int)((u32)d << 24);
}

__device__ __forceinline__ float block_sum(float value, float* per_warp) {
  // Sum over the block in one order: lanes by the tree of warp_sum, then warps from the first to the last.
  // per_warp: shared, one float per warp; may be used again at once.
  float sum = warp_sum(value);
  if (lane_id() == 0) per_warp[warp_id()] = sum;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < num_warps(); w++) total += per_warp[w];
  __syncthreads();
  return total;
}

__device__ __forceinline__ float block_max(float value, float* per_warp) {
  float best = warp_max(value);
  if (lane_id() == 0) per_warp[warp_id()] = best;
  __syncthreads();
  float total = per_warp[0];
  for (int w = 1; w < num_warps(); w++) total = fmaxf(total, per_warp[w]);
  __syncthreads();
  return total;
}
