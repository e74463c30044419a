// The products of attention.cu over fp16 pages: the same splits, columns and lanes, without scales.
#pragma once

template <int HD, int COLUMNS> struct Shared<HD, COLUMNS, true> {
  float scores[COLUMNS][SPLIT];  // and, at the end, the results [COLUMNS][HD]
  u16 weights[COLUMNS][SPLIT];
  float m[COLUMNS], l[COLUMNS], keep[COLUMNS], add[COLUMNS];
  float keeps[COLUMNS][WARP], adds[COLUMNS][WARP];  // of 32 splits that are folded
  int is_last;
};

template <int HD, int COLUMNS>
__device__ __forceinline__ void score(const Request& q, int base, int length, Shared<HD, COLUMNS, true>& shared) {
  int lane = lane_id(), g = lane / 4, t = lane % 4;
  for (int tile = warp_id(); tile < SPLIT / 16; tile += WARPS) {
    int key = base + 16 * tile;
    bool any = key < length;
    const u16* keys = any ? (const u16*)q.block_at<HD, true>(key) + (key % q.pool.page_tokens + g) * HD : nullptr;
    for (int n = 0; n < COLUMNS / 8; n++) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      const u16* query = (const u16*)q.query_codes + ((i64)q.row_of(8 * n + g) * q.heads + q.head_of(8 * n + g)) * HD;
      for (int k = 0; k < HD && any; k += 16) {
        uint2 upper = ((const uint2*)(keys + k))[t], lower = ((const uint2*)(keys + 8 * HD + k))[t], right = ((const uint2*)(query + k))[t];
        u32 a[4] = {upper.x, lower.x, upper.y, lower.y}, b[2] = {right.x, right.y};
        mma_f16_k16(sum, a, b);
      }
      for (int i = 0; i < 4; i++) {
        int column = 8 * n + 2 * t + i % 2, place = 16 * tile + g + 8 * (i / 2);
        shared.scores[column][place] = base + place < q.length_of(column) ? sum[i] : -INFINITY;
      }
    }
  }
}

template <int HD, int COLUMNS>
__device__ __forceinline__ void weigh(const Request&, int, int, Shared<HD, COLUMNS, true>& shared) {
  int lane = lane_id();
  for (int column = warp_id(); column < COLUMNS; column += WARPS) {
    float largest = -INFINITY, sum = 0.0f;
    for (int i = 0; i < SPLIT / 32; i++) largest = fmaxf(largest, shared.scores[column][32 * i + lane]);
    largest = warp_max(largest);
    for (int i = 0; i < SPLIT / 32; i++) {
      float s = shared.scores[column][32 * i + lane], p = s == -INFINITY ? 0.0f : expf(s - largest);
      sum += p;
      shared.weights[column][32 * i + lane] = float_to_half(p);
    }
    sum = warp_sum(sum);
    if (lane == 0) fold_sum(shared, column, largest, sum);
  }
}

// Four values of positions ``position`` on, 0 from ``length`` on: what no row of this launch has written may be anything.
__device__ __forceinline__ uint2 written_values(const u16* values, int position, int length) {
  uint2 four = *(const uint2*)values;
  int written = length - position;
  if (written < 4) four.y &= written < 3 ? 0u : 0xffffu;
  if (written < 2) four.x &= written < 1 ? 0u : 0xffffu;
  return four;
}

template <int HD, int COLUMNS>
__device__ __forceinline__ void add_values(const Request& q, int base, int length, const Shared<HD, COLUMNS, true>& shared,
                                           float (&acc)[(HD + 63) / 64][COLUMNS / 8][4]) {
  int lane = lane_id(), g = lane / 4, t = lane % 4, tokens = q.pool.page_tokens;
  for (int tile = 0; tile < (HD + 63) / 64; tile++) {
    int dim = 16 * (warp_id() + WARPS * tile);
    if (dim >= HD) continue;
    float part[COLUMNS / 8][4];
    for (int n = 0; n < COLUMNS / 8; n++)
      for (int i = 0; i < 4; i++) part[n][i] = 0.0f;
    for (int i = 0; i < SPLIT / 16 && base + 16 * i < length; i++) {
      int position = base + 16 * i;
      const u16* values = (const u16*)q.block_at<HD, true>(position) + (HD + dim + g) * tokens + position % tokens + 4 * t;
      uint2 upper = written_values(values, position + 4 * t, length), lower = written_values(values + 8 * tokens, position + 4 * t, length);
      for (int n = 0; n < COLUMNS / 8; n++) {
        uint2 right = ((const uint2*)&shared.weights[8 * n + g][16 * i])[t];
        u32 a[4] = {upper.x, lower.x, upper.y, lower.y}, b[2] = {right.x, right.y};
        mma_f16_k16(part[n], a, b);
      }
    }
    fold_part(shared, part, acc[tile]);
  }
}
