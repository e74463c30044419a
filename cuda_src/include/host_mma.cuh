// Host bodies of the matrix instructions: the lanes hand in their fragments, the last one multiplies (layouts in device.cuh).
#pragma once

namespace fibers {

// c += A B over k_bytes = 16 or 32 of bytes. fragment: a[4], b[2], c[4] of every lane.
template <int K> static inline void multiply_s8(Warp& warp) {
  i8 a[16][32], b[8][32];
  for (int lane = 0; lane < WARP; lane++) {
    const u32* f = warp.fragment[lane];
    int g = lane / 4, t = lane % 4;
    for (int i = 0; i < K / 8; i++) memcpy(&a[g + 8 * (i & 1)][16 * (i / 2) + 4 * t], &f[i], 4);
    for (int i = 0; i < K / 16; i++) memcpy(&b[g][16 * i + 4 * t], &f[4 + i], 4);
  }
  int c[16][8];
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < 8; column++) {
      int sum = 0;
      for (int k = 0; k < K; k++) sum += a[row][k] * b[column][k];
      c[row][column] = sum;
    }
  for (int lane = 0; lane < WARP; lane++)
    for (int i = 0; i < 4; i++) warp.fragment[lane][6 + i] += (u32)c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
}

// fp16 operands, products and sums in float, k rising: a GPU rounds its partial sums differently (its tests allow for that).
static inline void multiply_f16(Warp& warp) {
  float a[16][16], b[8][16];
  for (int lane = 0; lane < WARP; lane++) {
    const u32* f = warp.fragment[lane];
    int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 2; j++) a[g + 8 * (i & 1)][2 * t + 8 * (i / 2) + j] = half_to_float((u16)(f[i] >> (16 * j)));
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 2; j++) b[g][2 * t + 8 * i + j] = half_to_float((u16)(f[4 + i] >> (16 * j)));
  }
  for (int lane = 0; lane < WARP; lane++)
    for (int i = 0; i < 4; i++) {
      int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      float sum = bits_float(warp.fragment[lane][6 + i]);
      for (int k = 0; k < 16; k++) sum += a[row][k] * b[column][k];
      warp.fragment[lane][6 + i] = float_bits(sum);
    }
}

template <class T, class Multiply>
static inline void mma(T (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, Multiply multiply) {
  u32* mine = warps[current->warp].fragment[current->lane];
  mine[0] = a0, mine[1] = a1, mine[2] = a2, mine[3] = a3, mine[4] = b0, mine[5] = b1;
  memcpy(mine + 6, c, 16);
  collective(MMA, multiply);
  memcpy(c, mine + 6, 16);
}

}  // namespace fibers

static inline void mma_s8_k32(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  fibers::mma(c, a[0], a[1], a[2], a[3], b[0], b[1], fibers::multiply_s8<32>);
}

static inline void mma_s8_k16(int (&c)[4], u32 a0, u32 a1, u32 b0) { fibers::mma(c, a0, a1, 0, 0, b0, 0, fibers::multiply_s8<16>); }

static inline void mma_f16_k16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  fibers::mma(c, a[0], a[1], a[2], a[3], b[0], b[1], fibers::multiply_f16);
}
