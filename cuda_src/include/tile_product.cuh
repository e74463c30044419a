// Products of 16 weight rows with 8 * TILES activation rows on the matrix units.
//
// Eight warps share K, warp w has chains 4w .. 4w + 3 of product.cuh, so its sums are exactly the lanes' of row_product.cuh, and the tree
// over chains is finished in shared memory. Weights are A (rows g, g + 8 of lane 4g + t), activations B (column g), products C (rows g,
// g + 8, columns 2t, 2t + 1). The k slots of a fragment are permuted so that a lane's weights lie together; the activations' words are
// picked the same way, and an integer sum does not care. Where an activation row lies is X's affair: Activations, or a list of rows.
#pragma once

constexpr int WARPS = THREADS / WARP;
constexpr int OWN_CHAINS = CHAINS / WARPS;

template <int TILES> struct Reduction { float of_warp[WARPS][TILE_ROWS][8 * TILES]; };

// sums[i]: element i of C. Adds one pair's groups; row0, row1: the weight rows of this lane; column: of B.
template <class L, int TILES, class X>
__device__ __forceinline__ void add_pair(const Weights& w, const X& x, int pair, i64 row0, i64 row1, int first, int count,
                                         float (&sums)[TILES][4]) {
  int lane = lane_id(), g = lane / 4, t = lane % 4;
  u32 upper[4], lower[4];
  Scale<L::HALVES> scales[2];
  L::Codes::part(w, row0, pair, t, upper);
  L::Codes::part(w, row1, pair, t, lower);
  L::Scales::get(w, row0, pair, scales[0]);
  L::Scales::get(w, row1, pair, scales[1]);
  for (int tile = 0; tile < TILES; tile++) {
    const u32* codes = x.row_codes(min(first + 8 * tile + g, count - 1)) + 16 * pair;
    uint4 meta[2];
    for (int i = 0; i < 2; i++) meta[i] = x.row_meta(min(first + 8 * tile + 2 * t + i, count - 1))[pair];
    for (int group = 0; group < 2; group++) {
      for (int h = 0; h < L::HALVES; h++) {
        int c[4] = {0, 0, 0, 0};
        if (L::HALVES == 1) {
          u32 a[4] = {upper[2 * group], lower[2 * group], upper[2 * group + 1], lower[2 * group + 1]};
          u32 b[2] = {codes[8 * group + 2 * t], codes[8 * group + 2 * t + 1]};
          mma_s8_k32(c, a, b);
        } else {
          mma_s8_k16(c, upper[2 * group + h], lower[2 * group + h], codes[8 * group + 4 * h + t]);
        }
        for (int i = 0; i < 4; i++) {
          const uint4& m = meta[i % 2];
          const Scale<L::HALVES>& s = scales[i / 2];
          int at = group * L::HALVES + h;
          sums[tile][i] = accumulate<L>(sums[tile][i], c[i], group ? m.w : m.y, h, s.scale[at], L::AFFINE ? s.offset[at] : 0.0f,
                                        bits_float(group ? m.z : m.x));
        }
      }
    }
  }
}

// The same for float16 weights: a group's codes are exact as fp16, its 32 products are summed by the matrix unit, then scaled.
template <int TILES, class X>
__device__ __forceinline__ void add_pair_of_halves(const Weights& w, const X& x, int pair, i64 row0, i64 row1, int first, int count,
                                                   float (&sums)[TILES][4]) {
  int lane = lane_id(), g = lane / 4, t = lane % 4;
  for (int group = 0; group < 2; group++) {
    uint4 upper = ((const uint4*)(w.codes + row0 * 2 * w.width))[8 * pair + 4 * group + t];
    uint4 lower = ((const uint4*)(w.codes + row1 * 2 * w.width))[8 * pair + 4 * group + t];
    for (int tile = 0; tile < TILES; tile++) {
      const u32* codes = x.row_codes(min(first + 8 * tile + g, count - 1)) + 16 * pair + 8 * group + 2 * t;
      float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      u32 b[2];
      bytes_to_halves(codes[0], b[0], b[1]);
      u32 a[4] = {upper.x, lower.x, upper.y, lower.y};
      mma_f16_k16(c, a, b);
      bytes_to_halves(codes[1], b[0], b[1]);
      u32 rest[4] = {upper.z, lower.z, upper.w, lower.w};
      mma_f16_k16(c, rest, b);
      for (int i = 0; i < 4; i++) {
        uint4 meta = x.row_meta(min(first + 8 * tile + 2 * t + i % 2, count - 1))[pair];
        sums[tile][i] = fmaf(bits_float(group ? meta.z : meta.x), c[i], sums[tile][i]);
      }
    }
  }
}

// 16 weight rows from row on, times activation rows first .. first + 8 TILES - 1, into to[column][at + step * row]. All threads take part.
template <class L, int TILES, int STRIDE, class X>
__device__ __forceinline__ void multiply_tile(const Weights& w, const X& x, int rows, int row, int first, int count,
                                              Reduction<TILES>& shared, float (&to)[8 * TILES][STRIDE], int at, int step = 1) {
  int lane = lane_id(), g = lane / 4, t = lane % 4, warp = warp_id();
  int row0 = min(row + g, rows - 1), row1 = min(row + g + 8, rows - 1), num_pairs = w.width / 64;
  float chains[OWN_CHAINS][TILES][4];
  for (int chain = 0; chain < OWN_CHAINS; chain++)
    for (int tile = 0; tile < TILES; tile++)
      for (int i = 0; i < 4; i++) chains[chain][tile][i] = 0.0f;
  for (int base = OWN_CHAINS * warp; base < num_pairs; base += CHAINS) {
#pragma unroll
    for (int chain = 0; chain < OWN_CHAINS; chain++) {
      if (base + chain < num_pairs) {
        if constexpr (L::FLOATS) add_pair_of_halves<TILES>(w, x, base + chain, row0, row1, first, count, chains[chain]);
        else add_pair<L, TILES>(w, x, base + chain, row0, row1, first, count, chains[chain]);
      }
    }
  }
  for (int tile = 0; tile < TILES; tile++)
    for (int i = 0; i < 4; i++) {
      float sum = (chains[0][tile][i] + chains[1][tile][i]) + (chains[2][tile][i] + chains[3][tile][i]);
      shared.of_warp[warp][g + 8 * (i / 2)][8 * tile + 2 * t + i % 2] = sum;
    }
  __syncthreads();
  for (int i = threadIdx.x; i < TILE_ROWS * 8 * TILES; i += THREADS) {
    int r = i % TILE_ROWS, c = i / TILE_ROWS;
    float level[WARPS];
    for (int v = 0; v < WARPS; v++) level[v] = shared.of_warp[v][r][c];
    to[c][at + step * r] = ((level[0] + level[1]) + (level[2] + level[3])) + ((level[4] + level[5]) + (level[6] + level[7]));
  }
  __syncthreads();
}
