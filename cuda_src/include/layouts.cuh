// Weight layouts as kernels read them: strata/weights/layouts.py describes the planes; names and meanings are the same there.
//
// The unit is a pair of groups (64 weights of one row). A layout is put together from
//   Codes   the integers: whole() gives all 16 words of a pair to one lane (words in the order of the weights), part() gives
//           lane 4g + t of an mma its four words: two of the first group, two of the second, of row g
//   Scales  get() gives scale (and offset) of the pair's scale groups: HALVES per group of 32
// and the constants of weight = scale * (MUL * code + ADD) + offset.
#pragma once

struct Weights {
  const u8* codes;
  const u16* scales;
  const u8* steps;
  const u32* grid;  // packed3: 512 words of 4 magnitudes, in shared memory
  float unit;
  int width;
};

// ---------------------------------------------------------------- codes

struct NibbleCodes {
  static constexpr int GRID = 1;

  static __device__ __forceinline__ void split(u32 word, u32& low, u32& high) {
    low = word & 0x0f0f0f0fu;
    high = (word >> 4) & 0x0f0f0f0fu;
  }

  static __device__ __forceinline__ void whole(const Weights& w, i64 row, int pair, u32 (&words)[16]) {
    const uint4* from = (const uint4*)(w.codes + row * (w.width / 2)) + 2 * pair;
    for (int group = 0; group < 2; group++) {
      uint4 packed = load_once(from + group);
      u32* to = words + 8 * group;
      split(packed.x, to[0], to[1]);
      split(packed.y, to[2], to[3]);
      split(packed.z, to[4], to[5]);
      split(packed.w, to[6], to[7]);
    }
  }

  static __device__ __forceinline__ void part(const Weights& w, i64 row, int pair, int t, u32 (&words)[4]) {
    const u32* from = (const u32*)(w.codes + row * (w.width / 2)) + 8 * pair + t;
    split(from[0], words[0], words[1]);
    split(from[4], words[2], words[3]);
  }
};

template <int HALVES> struct ByteCodes {
  static constexpr int GRID = 1;

  static __device__ __forceinline__ void whole(const Weights& w, i64 row, int pair, u32 (&words)[16]) {
    const uint4* from = (const uint4*)(w.codes + row * w.width) + 4 * pair;
    for (int i = 0; i < 4; i++) {
      uint4 packed = load_once(from + i);
      words[4 * i] = packed.x;
      words[4 * i + 1] = packed.y;
      words[4 * i + 2] = packed.z;
      words[4 * i + 3] = packed.w;
    }
  }

  static __device__ __forceinline__ void part(const Weights& w, i64 row, int pair, int t, u32 (&words)[4]) {
    const u32* from = (const u32*)(w.codes + row * w.width) + 16 * pair;
    for (int group = 0; group < 2; group++) {
      words[2 * group] = from[8 * group + (HALVES == 1 ? 2 * t : t)];
      words[2 * group + 1] = from[8 * group + (HALVES == 1 ? 2 * t + 1 : 4 + t)];
    }
  }
};

struct PackedCodes {
  static constexpr int GRID = 512;

  // Four weights: magnitudes by a 9 bit index, negated byte by byte where a sign bit is set. Magnitudes are 1..15, so that
  // (m ^ mask) + (mask & 1) carries nothing from byte to byte. 0x10204080 puts four sign bits on the top bits of four bytes.
  static __device__ __forceinline__ u32 decode(const Weights& w, u32 index, u32 sign_bits) {
    u32 masks = top_bit_masks((sign_bits & 15) * 0x10204080u);
    return (w.grid[index] ^ masks) + (masks & 0x01010101u);
  }

  static __device__ __forceinline__ void whole(const Weights& w, i64 row, int pair, u32 (&words)[16]) {
    int groups = w.width / 32;
    const u8* line = w.codes + row * (12 * groups);
    uint4 low = load_once((const uint4*)line + pair);
    uint2 signs = ((const uint2*)(line + 8 * groups))[pair];
    u32 high = ((const u16*)(w.steps + row * (groups + groups / 2)))[pair];
    u32 lows[4] = {low.x, low.y, low.z, low.w};
    for (int i = 0; i < 16; i++) {
      u32 ninth_bits = (((high >> (i & 12)) & 15) * 0x10204080u >> 7) & 0x01010101u;  // one a byte, for four indices
      words[i] = decode(w, pair_bytes(lows[i / 4], ninth_bits, i % 4), (i < 8 ? signs.x : signs.y) >> (4 * (i % 8)));
    }
  }

  static __device__ __forceinline__ void part(const Weights& w, i64 row, int pair, int t, u32 (&words)[4]) {
    int groups = w.width / 32;
    const u8* line = w.codes + row * (12 * groups);
    for (int group = 0; group < 2; group++) {
      int at = 2 * pair + group;
      u32 low = ((const u16*)line)[4 * at + t];
      u32 high = (u32)w.steps[row * (groups + groups / 2) + at] >> (2 * t);
      u32 signs = line[8 * groups + 4 * at + t];
      words[2 * group] = decode(w, (low & 255) | (high & 1) << 8, signs);
      words[2 * group + 1] = decode(w, (low >> 8) | (high & 2) << 7, signs >> 4);
    }
  }
};

// ---------------------------------------------------------------- scales

template <int HALVES> struct Scale {
  float scale[2 * HALVES], offset[2 * HALVES];
};

struct FlatScales {
  static __device__ __forceinline__ void get(const Weights& w, i64 row, int pair, Scale<1>& s) {
    u32 both = ((const u32*)(w.scales + row * (w.width / 32)))[pair];
    s.scale[0] = half_to_float((u16)both);
    s.scale[1] = half_to_float((u16)(both >> 16));
  }
};

struct FlatAffineScales {
  static __device__ __forceinline__ void get(const Weights& w, i64 row, int pair, Scale<1>& s) {
    uint2 both = ((const uint2*)(w.scales + row * (w.width / 16)))[pair];
    s.scale[0] = half_to_float((u16)both.x);
    s.offset[0] = half_to_float((u16)(both.x >> 16));
    s.scale[1] = half_to_float((u16)both.y);
    s.offset[1] = half_to_float((u16)(both.y >> 16));
  }
};

struct OddScales {
  static __device__ __forceinline__ void get(const Weights& w, i64 row, int pair, Scale<1>& s) {
    float d = half_to_float(w.scales[row * (w.width / 256) + pair / 4]);
    u32 steps = ((const u16*)(w.steps + row * (w.width / 32)))[pair];
    s.scale[0] = d * (float)(int)(steps & 255);
    s.scale[1] = d * (float)(int)(steps >> 8);
  }
};

struct PackedScales {
  static __device__ __forceinline__ void get(const Weights& w, i64 row, int pair, Scale<1>& s) {
    int groups = w.width / 32;
    float d = half_to_float(w.scales[row * (w.width / 256) + pair / 4]);
    u32 steps = w.steps[row * (groups + groups / 2) + groups + pair];
    s.scale[0] = d * (float)(int)(1 + 2 * (steps & 15));
    s.scale[1] = d * (float)(int)(1 + 2 * (steps >> 4));
  }
};

template <int HALVES> struct SuperScales {
  static __device__ __forceinline__ void get(const Weights& w, i64 row, int pair, Scale<HALVES>& s) {
    float d = half_to_float(w.scales[row * (w.width / 256) + pair / 4]) * w.unit;
    u32 steps = ((const u32*)(w.steps + row * (w.width / 16)))[pair];
    for (int i = 0; i < 4; i++) s.scale[i] = d * (float)(i8)(steps >> (8 * i));
  }
};

template <int HALVES> struct SuperAffineScales {
  static __device__ __forceinline__ void get(const Weights& w, i64 row, int pair, Scale<HALVES>& s) {
    u32 both = ((const u32*)(w.scales + row * (w.width / 128)))[pair / 4];
    float d = half_to_float((u16)both), m = -half_to_float((u16)(both >> 16));
    const u32* steps = (const u32*)(w.steps + row * (w.width / 16 * HALVES)) + HALVES * pair;
    for (int i = 0; i < 2 * HALVES; i++) {
      u32 step = steps[i / 2] >> (16 * (i % 2));
      s.scale[i] = d * (float)(int)(step & 255);
      s.offset[i] = m * (float)(int)((step >> 8) & 255);
    }
  }
};

// ---------------------------------------------------------------- layouts

template <class C, class S, int halves, bool affine, int mul, int add> struct Layout {
  typedef C Codes;
  typedef S Scales;
  static constexpr int HALVES = halves, MUL = mul, ADD = add;
  static constexpr bool AFFINE = affine, FLOATS = false;
};

typedef Layout<PackedCodes, PackedScales, 1, false, 1, 0> packed3;
typedef Layout<NibbleCodes, OddScales, 1, false, 2, -15> odd4;
typedef Layout<NibbleCodes, FlatScales, 1, false, 1, -8> flat4;
typedef Layout<NibbleCodes, FlatAffineScales, 1, true, 1, 0> affine4;
typedef Layout<NibbleCodes, SuperAffineScales<1>, 1, true, 1, 0> super4;
typedef Layout<ByteCodes<1>, FlatScales, 1, false, 1, 0> flat8;
typedef Layout<ByteCodes<1>, FlatAffineScales, 1, true, 1, 0> affine8;
typedef Layout<ByteCodes<2>, SuperScales<2>, 2, false, 1, 0> super8;
typedef Layout<ByteCodes<2>, SuperAffineScales<2>, 2, true, 1, 0> affine_super8;

// float16 weights have no integers: matmul.cu multiplies them with the codes as fp16, 32 at a time, and scales the sum.
struct half {
  static constexpr int HALVES = 1;
  static constexpr bool FLOATS = true;
  struct Codes { static constexpr int GRID = 1; };
};

// The place of a layout that is not there, in kernels that take several.
struct none {
  struct Codes { static constexpr int GRID = 1; };
};
template <class L> constexpr bool PRESENT = true;
template <> constexpr bool PRESENT<none> = false;

// Copies packed3's table to shared memory; every thread of the block takes part. For other layouts it does nothing.
template <class L> __device__ __forceinline__ const u32* load_grid(const u32* from, u32* to) {
  if (L::Codes::GRID > 1) {
    for (int i = threadIdx.x; i < L::Codes::GRID; i += blockDim.x) to[i] = from[i];
    __syncthreads();
  }
  return to;
}

// One scale group's share of a dot product: the one place where integers become floats, and in what order they are rounded.
// dot = sum(code * u), sums: the activation's two int16 sums, half: which 16 weights (HALVES == 2), scale of the activation.
template <class L>
__device__ __forceinline__ float accumulate(float sum, int dot, u32 sums, int half, float weight_scale, float offset, float scale) {
  int picked = L::HALVES == 1 ? 0x0101 : (half == 0 ? 0x0001 : 0x0100);
  if (L::ADD != 0) dot = dot2((int)sums, L::HALVES == 1 ? (L::ADD & 255) * 0x0101 : 0, L::MUL * dot);
  sum = fmaf(weight_scale * scale, (float)dot, sum);
  if (L::AFFINE) sum = fmaf(offset * scale, (float)dot2((int)sums, picked, 0), sum);
  return sum;
}
