// Device bodies of the intrinsics: plain CUDA and inline PTX, no headers, so that NVRTC needs nothing but this folder.
#pragma once

#define SHARED(Type, name) __shared__ Type name
#define INFINITY __int_as_float(0x7f800000)

__device__ __forceinline__ float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ u16 float_to_half(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ int dot4(int a, int b, int sum) { return __dp4a(a, b, sum); }
// sum + pair[0] * bytes[0] + pair[1] * bytes[1]: two 16 bit numbers with the two low bytes.
__device__ __forceinline__ int dot2(int pair, int bytes, int sum) { return __dp2a_lo(pair, bytes, sum); }
__device__ __forceinline__ int round_to_int(float value) { return __float2int_rn(value); }
__device__ __forceinline__ int float_bits(float value) { return __float_as_int(value); }
__device__ __forceinline__ float bits_float(int bits) { return __int_as_float(bits); }

// Four masks of eight bits, each 0xff where bit 7 of the byte is set.
__device__ __forceinline__ u32 top_bit_masks(u32 word) {
  u32 masks;
  asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(masks) : "r"(word));
  return masks;
}

// Byte k of low below byte k of high, whose bytes are less than 128: prmt fills the upper half with the sign of the latter.
__device__ __forceinline__ u32 pair_bytes(u32 low, u32 high, int k) {
  u32 pair;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(pair) : "r"(low), "r"(high), "r"(0xcc40 + 0x1111 * k));
  return pair;
}

// Four signed bytes as fp16: xor makes them 0..255, whose fp16 form is 1024 + u with u in the low bits; then 1024 + 128 off, exactly.
__device__ __forceinline__ void bytes_to_halves(u32 bytes, u32& first, u32& second) {
  u32 shifted = bytes ^ 0x80808080u;
  asm("{ .reg .b32 x; prmt.b32 x, %1, 0x64646464, 0x4140; sub.f16x2 %0, x, %2; }" : "=r"(first) : "r"(shifted), "r"(0x64806480u));
  asm("{ .reg .b32 x; prmt.b32 x, %1, 0x64646464, 0x4342; sub.f16x2 %0, x, %2; }" : "=r"(second) : "r"(shifted), "r"(0x64806480u));
}

// Read-only 16 byte loads, past the first-level cache for weights that are read once.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// A value that another block of this launch wrote before its __threadfence.
__device__ __forceinline__ float load_fresh(const float* from) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}

__device__ __forceinline__ float warp_sum(float value) {
  for (int step = 1; step < 32; step *= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
  for (int step = 1; step < 32; step *= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

__device__ __forceinline__ int warp_sum(int value) {
  for (int step = 1; step < 32; step *= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// C[16][8] += A[16][32] B[32][8], bytes in, int32 out. Fragments as in the PTX manual: lane = 4g + t holds rows g and g + 8 of A
// (a[0], a[1]: k 4t..4t+3; a[2], a[3]: k 16+4t..), column g of B (b[0], b[1] likewise), columns 2t, 2t+1 of C (c[2], c[3]: row g+8).
__device__ __forceinline__ void mma_s8_k32(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  for (int half = 0; half < 2; half++) {
    for (int k = 0; k < 2; k++) {
      asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
          : "+r"(c[2 * half]), "+r"(c[2 * half + 1]) : "r"(a[half + 2 * k]), "r"(b[k]));
    }
  }
#endif
}

// C[16][8] += A[16][16] B[16][8], bytes: the first half of the fragments of mma_s8_k32 (a[0], a[1] and b[0]).
__device__ __forceinline__ void mma_s8_k16(int (&c)[4], u32 a0, u32 a1, u32 b0) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
#else
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};" : "+r"(c[0]), "+r"(c[1]) : "r"(a0), "r"(b0));
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};" : "+r"(c[2]), "+r"(c[3]) : "r"(a1), "r"(b0));
#endif
}

// C[16][8] += A[16][16] B[16][8], fp16 in, fp32 out. a[i]: row g + 8 (i & 1), k 2t, 2t+1 (+ 8 from a[2] on); b[i]: k 2t + 8i, column g.
__device__ __forceinline__ void mma_f16_k16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  for (int k = 0; k < 2; k++) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
  }
#endif
}
