// Host bodies of the intrinsics: what a GPU does in one instruction, said in C++ (see fibers.cuh for threads and barriers).
#pragma once

#include <math.h>
#include <string.h>

#define __global__ static
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

#include "fibers.cuh"

#define threadIdx (fibers::current->index)
#define blockIdx (fibers::block_index)
#define blockDim (fibers::block_size)
#define gridDim (fibers::grid_size)
#define SHARED(Type, name) Type& name = fibers::shared<Type>()

static inline void __syncthreads() { fibers::block_barrier(); }
static inline void __threadfence() {}
static inline void __syncwarp() { fibers::collective(fibers::SYNC, [](fibers::Warp&) {}); }

template <class T> static inline T __shfl_sync(u32, T value, int from) { return fibers::exchange(value, from); }
template <class T> static inline T __shfl_xor_sync(u32, T value, int step) { return fibers::exchange(value, lane_of_fiber() ^ step); }
template <class T> static inline T __shfl_up_sync(u32, T value, int step) {
  int lane = lane_of_fiber();
  return fibers::exchange(value, lane >= step ? lane - step : lane);
}
template <class T> static inline T __shfl_down_sync(u32, T value, int step) {
  int lane = lane_of_fiber();
  return fibers::exchange(value, lane + step < WARP ? lane + step : lane);
}

static inline u32 __ballot_sync(u32, int predicate) {
  u32 votes = 0;
  for (int lane = 0; lane < WARP; lane++) votes |= (fibers::gather(predicate != 0, lane == 0)[lane] ? 1u : 0u) << lane;
  return votes;
}

// Blocks and threads run one at a time, so a plain read and write is atomic.
template <class T> static inline T atomicAdd(T* at, T value) { T old = *at; *at = old + value; return old; }
template <class T> static inline T atomicMax(T* at, T value) { T old = *at; if (value > old) *at = value; return old; }
