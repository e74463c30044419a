// Host bodies of the intrinsics: what a GPU does in one instruction, said in C++ (fibers.cuh has threads and barriers,
// export.cuh the door to Python).
#pragma once

#include <math.h>
#include <string.h>

#define __global__ static
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct alignas(8) uint2 { u32 x, y; };
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
static inline void __syncwarp() { fibers::collective(fibers::SYNC, [](fibers::Warp&) {}); }
static inline void __threadfence() {}

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
  const u64* votes = fibers::gather((int)(predicate != 0));
  u32 lanes = 0;
  for (int lane = 0; lane < WARP; lane++) lanes |= (u32)(votes[lane] & 1) << lane;
  return lanes;
}

// Blocks and threads run one at a time, so a plain read and write is atomic.
template <class T> static inline T atomicAdd(T* at, T value) { T old = *at; *at = old + value; return old; }
template <class T> static inline T atomicMax(T* at, T value) { T old = *at; if (value > old) *at = value; return old; }

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline u32 __umulhi(u32 a, u32 b) { return (u32)(((u64)a * b) >> 32); }
static inline int __popc(u32 word) { return __builtin_popcount(word); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

static inline int float_bits(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
static inline float bits_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline int round_to_int(float value) { return value != value ? 0 : (int)rintf(value); }  // NaN: 0, as cvt.rni.s32.f32
static inline float load_fresh(const float* from) { return *from; }
static inline uint4 load_once(const uint4* from) { return *from; }

static inline float half_to_float(u16 bits) {
  // Subnormal halves: the mantissa as an integer times 2^-24. Infinities and NaNs keep an exponent of all ones.
  u32 sign = (u32)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  if (exponent == 0) return bits_float(sign | float_bits((float)mantissa * 0x1p-24f));
  return bits_float(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}

static inline u16 float_to_half(float value) {
  // Round to nearest, ties to even. Below 2^-14 adding 0.5 lines the bits up with the half's fixed unit of 2^-24.
  u32 bits = float_bits(value), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return sign | 0x7fff;
  if (size >= 0x477ff000u) return sign | 0x7c00;
  if (size < 0x38800000u) return sign | (u16)(float_bits(bits_float(size) + 0.5f) - float_bits(0.5f));
  size += 0xfff + ((size >> 13) & 1);
  return sign | (u16)((size - 0x38000000u) >> 13);
}

static inline int dot4(int a, int b, int sum) {
  const i8* x = (const i8*)&a;
  const i8* y = (const i8*)&b;
  return sum + x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
}

static inline int dot2(int pair, int bytes, int sum) { return sum + (short)pair * (i8)bytes + (pair >> 16) * (i8)(bytes >> 8); }

static inline u32 pair_bytes(u32 low, u32 high, int k) { return ((low >> (8 * k)) & 255) | ((high >> (8 * k)) & 255) << 8; }

static inline void bytes_to_halves(u32 bytes, u32& first, u32& second) {
  u32 half[4];
  for (int i = 0; i < 4; i++) half[i] = float_to_half((float)(i8)(bytes >> (8 * i)));
  first = half[0] | half[1] << 16;
  second = half[2] | half[3] << 16;
}

static inline u32 top_bit_masks(u32 word) { return ((word >> 7) & 0x01010101u) * 255u; }

static inline float warp_sum(float value) { return fibers::reduce(value, [](float a, float b) { return a + b; }); }
static inline float warp_max(float value) { return fibers::reduce(value, [](float a, float b) { return fmaxf(a, b); }); }
static inline int warp_sum(int value) { return fibers::reduce(value, [](int a, int b) { return a + b; }); }

#include "host_mma.cuh"
#include "export.cuh"
