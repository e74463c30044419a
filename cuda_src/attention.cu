// Causal attention over pages (flash decoding), for decode rows and prompts in one arithmetic; over int8 pages the products are integer.
//
// A block has one KV head and a tile of query columns: column c is query row tile * rows_per_tile + c / G, query head
// head * G + c % G (G query heads share a KV head; K and V are read once for all columns). Keys come in splits of 256 positions
// at multiples of 256: a split's result depends on the row's own position alone. For each split:
//   scores   s = sum over scale groups of (key scale * query scale) * (exact int32 product); -inf beyond the row's position
//   weights  m = max s, p = exp(s - m), l = sum p (lane t adds positions t, t + 32, ...; then the tree of lanes)
//   codes    for 32 positions and a group of dimensions, p * value scale is quantised to 0..127 with one float scale, because the
//            values' scales differ from position to position and an integer sum needs one
//   values   sum over 32 positions exact in int32, then fmaf(scale, sum, acc), position groups rising
// Splits are folded in rising order: (m, l, acc) -> n = max(m, m'), l exp(m - n) + l' exp(m' - n), acc likewise.
//
// splits_per_block 1 (decode): each split is a block, its result goes to ``partial`` and the last block of a (row, head) to finish
// folds all in order. Large (prompts): a block folds its splits itself. Both run the same operations, so a row of a prompt has the bits
// of a decode row. The grid may be larger than a row needs (a context bucket): blocks beyond its length do nothing.
//
// F16: queries, keys, values and p are fp16, products run on tensor cores with fp32 sums, dimensions and positions rising 16 at a time;
// what a row does not see has p = 0 and is finite (pages.cuh). Splits and folding are the same (attention_f16.cuh).
//
// Out: activations (activations.cuh) [rows, heads * HD]. partial float32 [rows, heads, max_splits, HD + 2]: acc, m, l.
// arrived int32 [rows, KV heads]: zero before and after.
#include "strata.cuh"
#include "activations.cuh"
#include "pages.cuh"

constexpr int THREADS = 128, WARPS = 4, SPLIT = 256;

struct Request {  // the parameters, by the names of the kernel's
  const i8* query_codes;
  const float* query_scales;
  Pool pool;
  const int* table;
  int heads, group, kv_head, first_row, last_row;
  const int* positions;

  __device__ __forceinline__ int row_of(int column) const { return min(first_row + column / group, last_row); }
  __device__ __forceinline__ int head_of(int column) const { return kv_head * group + column % group; }
  __device__ __forceinline__ int length_of(int column) const { return positions[row_of(column)] + 1; }
  template <int HD, bool F16 = false> __device__ __forceinline__ i8* block_at(int position) const {
    return pool.head<HD, F16>(table[position / pool.page_tokens], kv_head);
  }
};

template <int HD, int COLUMNS, bool F16 = false> struct Shared {
  float scores[COLUMNS][SPLIT];  // and, at the end, the results [COLUMNS][HD]
  i8 codes[Head<HD>::GROUPS][COLUMNS][SPLIT];
  float code_scales[Head<HD>::GROUPS][COLUMNS][SPLIT / 32];
  float m[COLUMNS], l[COLUMNS], keep[COLUMNS], add[COLUMNS];
  float keeps[COLUMNS][WARP], adds[COLUMNS][WARP];  // of 32 splits that are folded
  int is_last;
};

// A split's largest score and sum into those of the splits before it.
template <class Memory> __device__ __forceinline__ void fold_sum(Memory& shared, int column, float largest, float sum) {
  float before = shared.m[column], now = fmaxf(before, largest);
  float keep = expf(before - now), add = expf(largest - now);
  shared.m[column] = now;
  shared.l[column] = shared.l[column] * keep + sum * add;
  shared.keep[column] = keep;
  shared.add[column] = add;
}

template <class Memory, int N>
__device__ __forceinline__ void fold_part(const Memory& shared, const float (&part)[N][4], float (&acc)[N][4]) {
  for (int n = 0; n < N; n++)
    for (int j = 0; j < 4; j++) {
      int column = 8 * n + 2 * (lane_id() % 4) + j % 2;
      acc[n][j] = acc[n][j] * shared.keep[column] + part[n][j] * shared.add[column];
    }
}

template <int HD, int COLUMNS>
__device__ __forceinline__ void score(const Request& q, int base, int length, Shared<HD, COLUMNS>& shared) {
  constexpr int GROUP = Head<HD>::GROUP, GROUPS = Head<HD>::GROUPS;
  int lane = lane_id(), g = lane / 4, t = lane % 4;
  for (int tile = warp_id(); tile < SPLIT / 16; tile += WARPS) {
    int key = base + 16 * tile;
    bool any = key < length;
    i8* block = any ? q.block_at<HD>(key) : nullptr;
    int at = key % q.pool.page_tokens + g;
    for (int n = 0; n < COLUMNS / 8; n++) {
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int group = 0; group < GROUPS && any; group++) {
        int c[4] = {0, 0, 0, 0};
        const i8* query = q.query_codes + ((i64)q.row_of(8 * n + g) * q.heads + q.head_of(8 * n + g)) * HD;
        for (int k = group * GROUP; k < (group + 1) * GROUP; k += 32) {
          uint2 upper = ((const uint2*)(block + at * HD + k))[t], lower = ((const uint2*)(block + (at + 8) * HD + k))[t];
          uint2 right = ((const uint2*)(query + k))[t];
          u32 a[4] = {upper.x, lower.x, upper.y, lower.y}, b[2] = {right.x, right.y};
          mma_s8_k32(c, a, b);
        }
        for (int i = 0; i < 4; i++) {
          int column = 8 * n + 2 * t + i % 2;
          float key_scale = half_to_float(q.pool.key_scales<HD>(block)[(at + 8 * (i / 2)) * GROUPS + group]);
          float query_scale = q.query_scales[((i64)q.row_of(column) * q.heads + q.head_of(column)) * GROUPS + group];
          sum[i] = fmaf(key_scale * query_scale, (float)c[i], sum[i]);
        }
      }
      for (int i = 0; i < 4; i++) {
        int column = 8 * n + 2 * t + i % 2, place = 16 * tile + g + 8 * (i / 2);
        shared.scores[column][place] = base + place < q.length_of(column) ? sum[i] : -INFINITY;
      }
    }
  }
}

// Probabilities and codes of one split, and how the split folds into what came before: one warp per column.
template <int HD, int COLUMNS>
__device__ __forceinline__ void weigh(const Request& q, int base, int length, Shared<HD, COLUMNS>& shared) {
  constexpr int GROUPS = Head<HD>::GROUPS;
  int lane = lane_id();
  for (int column = warp_id(); column < COLUMNS; column += WARPS) {
    float p[SPLIT / 32], largest = -INFINITY, sum = 0.0f;
    for (int i = 0; i < SPLIT / 32; i++) largest = fmaxf(largest, p[i] = shared.scores[column][32 * i + lane]);
    largest = warp_max(largest);
    bool broken = false;
    for (int i = 0; i < SPLIT / 32; i++) {
      p[i] = p[i] == -INFINITY ? 0.0f : expf(p[i] - largest);
      sum += p[i];
    }
    for (int i = 0; i < SPLIT / 32 && base + 32 * i < length; i++) {
      int position = base + 32 * i;
      const u16* scales = q.pool.value_scales<HD>(q.block_at<HD>(position)) + position % q.pool.page_tokens + lane;
      for (int group = 0; group < GROUPS; group++) {
        float weight = p[i] == 0.0f ? 0.0f : p[i] * half_to_float(scales[group * q.pool.page_tokens]);
        broken = broken || weight != weight;
        float most = warp_max(weight), inverse = most > 0.0f ? 127.0f / most : 0.0f;
        shared.codes[group][column][32 * i + lane] = (i8)round_to_int(weight * inverse);
        if (lane == 0) shared.code_scales[group][column][i] = most / 127.0f;
      }
    }
    sum = warp_sum(sum);
    if (__ballot_sync(ALL_LANES, broken)) sum = bits_float(0x7fc00000);
    if (lane == 0) fold_sum(shared, column, largest, sum);
  }
}

// acc[tile][n][i]: dimensions 16 (warp + 4 tile) + g (+ 8), columns 8n + 2t (+ 1).
template <int HD, int COLUMNS>
__device__ __forceinline__ void add_values(const Request& q, int base, int length, const Shared<HD, COLUMNS>& shared,
                                           float (&acc)[(HD + 63) / 64][COLUMNS / 8][4]) {
  int lane = lane_id(), g = lane / 4, t = lane % 4;
  for (int tile = 0; tile < (HD + 63) / 64; tile++) {
    int dim = 16 * (warp_id() + WARPS * tile);
    if (dim >= HD) continue;
    int group = dim / Head<HD>::GROUP;
    float part[COLUMNS / 8][4];
    for (int n = 0; n < COLUMNS / 8; n++)
      for (int i = 0; i < 4; i++) part[n][i] = 0.0f;
    for (int i = 0; i < SPLIT / 32 && base + 32 * i < length; i++) {
      int position = base + 32 * i;
      const i8* values = q.pool.values<HD>(q.block_at<HD>(position)) + position % q.pool.page_tokens;
      uint2 upper = ((const uint2*)(values + (dim + g) * q.pool.page_tokens))[t];
      uint2 lower = ((const uint2*)(values + (dim + g + 8) * q.pool.page_tokens))[t];
      for (int n = 0; n < COLUMNS / 8; n++) {
        uint2 right = ((const uint2*)&shared.codes[group][8 * n + g][32 * i])[t];
        int c[4] = {0, 0, 0, 0};
        u32 a[4] = {upper.x, lower.x, upper.y, lower.y}, b[2] = {right.x, right.y};
        mma_s8_k32(c, a, b);
        for (int j = 0; j < 4; j++) part[n][j] = fmaf(shared.code_scales[group][8 * n + 2 * t + j % 2][i], (float)c[j], part[n][j]);
      }
    }
    fold_part(shared, part, acc[tile]);
  }
}

#include "attention_f16.cuh"
#include "attention_end.cuh"

template <int HD, int TILES, bool F16 = false>
__global__ void __launch_bounds__(THREADS, 2) attention(
    const i8* query_codes, const float* query_scales, int rows, int heads, int kv_heads, int rows_per_tile, const int* positions,
    const int* row_table, const int* tables, int max_pages, i8* pool, i64 page_stride, i64 layer_offset, int page_tokens,
    int splits_per_block, float* partial, int max_splits, int* arrived, i8* codes, u32* meta, int width) {
  constexpr int COLUMNS = 8 * TILES;
  typedef Shared<HD, COLUMNS, F16> Memory;
  SHARED(Memory, shared);
  int first_row = blockIdx.z * rows_per_tile, last_row = min(first_row + rows_per_tile, rows) - 1, kv_head = blockIdx.y;
  Request q = {query_codes, query_scales, {pool, page_stride, layer_offset, page_tokens}, tables + (i64)row_table[first_row] * max_pages,
               heads, heads / kv_heads, kv_head, first_row, last_row, positions};
  int columns = (last_row - first_row + 1) * q.group, length = positions[last_row] + 1;
  int splits = (length + SPLIT - 1) / SPLIT, split = blockIdx.x * splits_per_block;
  if (split >= splits) return;
  bool whole = splits <= splits_per_block;

  float acc[(HD + 63) / 64][TILES][4];
  for_each<HD, COLUMNS>(acc, [](int, int, float& value) { value = 0.0f; });
  for (int c = threadIdx.x; c < COLUMNS; c += THREADS) shared.m[c] = -INFINITY, shared.l[c] = 0.0f;
  __syncthreads();
  for (int end = min(split + splits_per_block, splits); split < end; split++) {
    score(q, SPLIT * split, length, shared);
    __syncthreads();
    weigh(q, SPLIT * split, length, shared);
    __syncthreads();
    add_values(q, SPLIT * split, length, shared, acc);
    __syncthreads();
  }

  if (whole) {
    for_each<HD, COLUMNS>(acc, [&](int column, int dim, float& value) { shared.scores[column][dim] = value / shared.l[column]; });
  } else {
    float* mine = partial + ((i64)first_row * heads + kv_head * q.group) * max_splits * (HD + 2);
    for_each<HD, COLUMNS>(acc, [&](int column, int dim, float& value) {
      if (column < columns) mine[((i64)column * max_splits + blockIdx.x) * (HD + 2) + dim] = value;
    });
    for (int c = threadIdx.x; c < columns; c += THREADS) {
      mine[((i64)c * max_splits + blockIdx.x) * (HD + 2) + HD] = shared.m[c];
      mine[((i64)c * max_splits + blockIdx.x) * (HD + 2) + HD + 1] = shared.l[c];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.is_last = atomicAdd(&arrived[first_row * kv_heads + kv_head], 1) == splits - 1;
    __syncthreads();
    if (!shared.is_last) return;
    if (threadIdx.x == 0) arrived[first_row * kv_heads + kv_head] = 0;
    fold_partials(mine, columns, splits, max_splits, shared);
  }
  __syncthreads();
  write_results(q, columns, shared, codes, meta, width);
}
