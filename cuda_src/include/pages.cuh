// Keys and values in pages: int8 with one float16 scale per token, head and group of dimensions; or fp16 (below).
//
// pool: int8 [pages][layers of the stage][KV heads][head block]; a head block holds, for T = page_tokens positions:
//   keys          int8 [T][HD]          a query's product runs along dimensions
//   values        int8 [HD][T]          transposed: the product with probabilities runs along positions
//   key scales    fp16 [T][HD / GROUP]
//   value scales  fp16 [HD / GROUP][T]
// One page id covers every layer, so parking a page is one copy. T is a multiple of 32. The scale is rounded to fp16 first and
// codes are made for the rounded one. strata/kernels/pages.py computes the same sizes.
//
// F16: keys fp16 [T][HD], then values fp16 [HD][T], no scales. Values are finite always, because a probability of zero must hide what a
// row does not see: beyond +-65504 they are clamped, and where a value is NaN it is stored as 0 and the key of that position as NaN.
#pragma once

template <int HD> struct Head {
  static constexpr int GROUP = HD % 64 == 0 ? 64 : 32, GROUPS = HD / GROUP;
};

struct Pool {
  i8* base;
  i64 page_stride, layer_offset;  // bytes
  int page_tokens;

  template <int HD, bool F16 = false> __device__ __forceinline__ i8* head(int page, int head) const {
    constexpr int BYTES = F16 ? 2 * HD : HD + 2 * Head<HD>::GROUPS;  // of one position's keys
    return base + page * page_stride + layer_offset + (i64)head * (2 * page_tokens * BYTES);
  }
  template <int HD> __device__ __forceinline__ i8* values(i8* head) const { return head + page_tokens * HD; }
  template <int HD> __device__ __forceinline__ u16* key_scales(i8* head) const { return (u16*)(head + 2 * page_tokens * HD); }
  template <int HD> __device__ __forceinline__ u16* value_scales(i8* head) const {
    return (u16*)(head + 2 * page_tokens * (HD + Head<HD>::GROUPS));
  }
};
