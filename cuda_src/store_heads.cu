// From the joined q, k, v of a row to what attention reads: q/k norm, RoPE, int8 or fp16; keys and values into their page.
//
// qkv float32 [rows, HEADS + 2 KV, HD] (q heads, then k, then v; pairs of RoPE interleaved: 2i, 2i + 1).
// turns float32 [rows, rope_pairs, 2]: cosine and sine for the row's position, from float64 on the host: at position 262144 an angle in
// float32 would be off by 0.03 rad. The first 2 rope_pairs dimensions of q and k turn.
// Out: query_codes int8 [rows, heads, HD], query_scales float32 [rows, heads, HD / GROUP] with softmax_scale included, and
// the pool (pages.cuh): row i writes at positions[i] of page tables[row_table[i]][positions[i] / page_tokens].
// One warp per head; lane l has dimensions l, l + 32, ...; its RoPE partner is the neighbouring lane.
#include "strata.cuh"
#include "pages.cuh"

constexpr int HEADS_PER_BLOCK = 4;

template <int HD> struct Lane { float value[HD / 32]; };

// Codes of one scale group (GROUP / 32 values a lane); returns the inverse of the scale that was rounded by the caller's rule.
template <int N> __device__ __forceinline__ float largest_of(const float* value, bool& broken) {
  float largest = 0.0f;
  bool nan = false;
  for (int i = 0; i < N; i++) {
    largest = fmaxf(largest, fabsf(value[i]));
    nan = nan || value[i] != value[i];
  }
  broken = __ballot_sync(ALL_LANES, nan) != 0;
  return warp_max(largest);
}

// F16: queries (softmax_scale included), keys and values as fp16; query_scales is not touched.
__device__ __forceinline__ u16 finite_half(float value) {
  return float_to_half(value != value ? value : fminf(65504.0f, fmaxf(-65504.0f, value)));
}

template <int HD, bool F16 = false>
__global__ void __launch_bounds__(32 * HEADS_PER_BLOCK) store_heads(
    const float* qkv, const float* q_norm, const float* k_norm, int has_norm, float eps, const float* turns, int rope_pairs,
    int heads, int kv_heads, float softmax_scale, const int* positions, const int* row_table, const int* tables, int max_pages,
    i8* query_codes, float* query_scales, i8* pool, i64 page_stride, i64 layer_offset, int page_tokens) {
  constexpr int GROUP = Head<HD>::GROUP, GROUPS = Head<HD>::GROUPS, PER_LANE = GROUP / 32;
  int head = blockIdx.x * HEADS_PER_BLOCK + warp_id(), row = blockIdx.y, lane = lane_id();
  if (head >= heads + 2 * kv_heads) return;
  bool is_query = head < heads, is_value = head >= heads + kv_heads;
  Lane<HD> x;
  for (int i = 0; i < HD / 32; i++) x.value[i] = qkv[((i64)row * (heads + 2 * kv_heads) + head) * HD + 32 * i + lane];

  if (has_norm && !is_value) {
    const float* gamma = is_query ? q_norm : k_norm;
    float sum = 0.0f;
    for (int i = 0; i < HD / 32; i++) sum += x.value[i] * x.value[i];
    float scale = 1.0f / sqrtf(warp_sum(sum) / (float)HD + eps);
    for (int i = 0; i < HD / 32; i++) x.value[i] = x.value[i] * scale * gamma[32 * i + lane];
  }
  if (!is_value) {
    for (int i = 0; i < HD / 32; i++) {
      int pair = (32 * i + lane) / 2;
      float partner = __shfl_xor_sync(ALL_LANES, x.value[i], 1);
      if (pair < rope_pairs) {
        float c = turns[((i64)row * rope_pairs + pair) * 2], s = turns[((i64)row * rope_pairs + pair) * 2 + 1];
        x.value[i] = lane % 2 == 0 ? x.value[i] * c - partner * s : x.value[i] * c + partner * s;
      }
    }
  }

  int position = positions[row];
  Pool pages = {pool, page_stride, layer_offset, page_tokens};
  int page = tables[(i64)row_table[row] * max_pages + position / page_tokens], at = position % page_tokens;
  i8* block = pages.head<HD, F16>(page, (head - heads) % kv_heads);
  if constexpr (F16) {
    bool broken = false;
    for (int i = 0; i < HD / 32; i++) {
      float value = is_query ? 0.0f : is_value ? x.value[i] : qkv[((i64)row * (heads + 2 * kv_heads) + head + kv_heads) * HD + 32 * i + lane];
      broken = broken || value != value;
    }
    broken = __ballot_sync(ALL_LANES, broken) != 0;
    for (int i = 0; i < HD / 32; i++) {
      int dim = 32 * i + lane;
      if (is_query) ((u16*)query_codes)[((i64)row * heads + head) * HD + dim] = finite_half(x.value[i] * softmax_scale);
      else if (is_value) ((u16*)block)[(HD + dim) * page_tokens + at] = broken ? 0 : finite_half(x.value[i]);
      else ((u16*)block)[at * HD + dim] = broken ? 0x7e00 : finite_half(x.value[i]);
    }
    return;
  }
  for (int group = 0; group < GROUPS; group++) {
    bool broken;
    float largest = largest_of<PER_LANE>(x.value + group * PER_LANE, broken);
    float scale = largest / 127.0f;
    if (!is_query) scale = half_to_float(float_to_half(scale));
    float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    if (broken) scale = bits_float(0x7fc00000);
    for (int i = 0; i < PER_LANE; i++) {
      int dim = group * GROUP + 32 * i + lane;
      i8 code = (i8)max(-127, min(127, round_to_int(x.value[group * PER_LANE + i] * inverse)));
      if (is_query) query_codes[((i64)row * heads + head) * HD + dim] = code;
      else if (is_value) pages.values<HD>(block)[dim * page_tokens + at] = code;
      else block[at * HD + dim] = code;
    }
    if (lane == 0) {
      if (is_query) query_scales[((i64)row * heads + head) * GROUPS + group] = scale * softmax_scale;
      else if (is_value) pages.value_scales<HD>(block)[group * page_tokens + at] = float_to_half(scale);
      else pages.key_scales<HD>(block)[at * GROUPS + group] = float_to_half(scale);
    }
  }
}
