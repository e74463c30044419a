// Activations as kernels multiply them: int8 codes in groups of 32 with one float scale, and the codes' sums.
//
// Of a matrix [rows, width] (width a multiple of 64, padded with zeros):
//   codes  int8 [rows, width]
//   meta   uint32 [rows, width / 32, 2]: the scale's bits, then two int16: the sums of the group's first and last 16 codes
// scale = largest magnitude / 127, code = round(x / scale). A NaN or an infinity in a group makes its scale NaN or infinite, so
// that it reaches the logits, where the row is found broken. The sums serve weights with an offset: sum((a q + b) u) =
// a sum(q u) + b sum(u), all in integers.
#pragma once

struct Activations {
  const i8* codes;
  const u32* meta;
  int width;

  __device__ __forceinline__ const u32* row_codes(int row) const { return (const u32*)(codes + (i64)row * width); }
  __device__ __forceinline__ const uint4* row_meta(int row) const { return (const uint4*)(meta + (i64)row * (width / 16)); }  // one a pair
};

// Quantises one group: the lanes of a warp hold its 32 values.
__device__ __forceinline__ void quantize_group(float value, i8* codes, u32* meta) {
  int lane = lane_id();
  float largest = warp_max(fabsf(value));
  bool broken = __ballot_sync(ALL_LANES, value != value) != 0;  // fmaxf would drop a NaN
  float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  int code = round_to_int(value * inverse);
  int both = warp_sum(lane < 16 ? code : code * 65536);
  int first = (short)both;
  codes[lane] = (i8)code;
  if (lane == 0) {
    meta[0] = broken ? 0x7fc00000u : (u32)float_bits(largest / 127.0f);
    meta[1] = (u32)(first & 0xffff) | (u32)(both - first);
  }
}
