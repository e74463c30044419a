// Cuts of a row of logits, best first, by a threshold instead of a sort.
//
// A token's rank is one 64 bit number: its logit as an integer of the same order, then the complement of its id, so that equal
// logits are ordered by id, the lowest first, and no two ranks are equal. A cut is the rank of the last token kept. It is found
// byte by byte from the top: a histogram of weights over the tokens that share the bytes found so far, then the bin in which the
// sum from above reaches the target. Weights are integers (1 for a count, a fixed-point probability for a mass), so that the sums
// of a histogram do not depend on the order in which threads add.
#pragma once

constexpr u64 NO_CUT = 0;

struct Selection {
  u64 bins[256];
  u64 prefix, above;
  int done;
};

__device__ __forceinline__ u64 rank_of(float logit, int id) {
  u32 bits = (u32)float_bits(logit + 0.0f);  // + 0: -0 and 0 are equal
  u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (u64)ordered << 32 | (u32)~(u32)id;
}

// The lowest rank whose weight and that of all higher ranks reach target; ranks below floor do not count. All threads take part.
template <class Weight>
__device__ __forceinline__ u64 select(const float* logits, int count, u64 floor, u64 target, Selection& shared, Weight weight) {
  u64 mask = 0;
  if (threadIdx.x == 0) shared.prefix = shared.above = 0, shared.done = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) shared.bins[i] = 0;
    __syncthreads();
    u64 prefix = shared.prefix;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      u64 rank = rank_of(logits[i], i);
      if ((rank & mask) == prefix && rank >= floor) atomicAdd(&shared.bins[(rank >> shift) & 255], weight(logits[i]));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int bin = 255;
      while (bin > 0 && shared.above + shared.bins[bin] < target) shared.above += shared.bins[bin--];
      shared.prefix = prefix | (u64)bin << shift;
      shared.done = shared.above + shared.bins[bin] == target;  // the whole bin is kept: its lowest rank is the cut
    }
    __syncthreads();
    mask |= 255ull << shift;
    if (shared.done) break;
  }
  u64 cut = shared.prefix;
  __syncthreads();
  return cut > floor ? cut : floor;
}
