// Which experts a row goes through, and with what weights. Nothing of it returns to the host.
//
// route: x = RMSNorm(hidden) * gamma, as rms_norm.cu computes it but not quantised: a choice is all or nothing, and int8 would make some
// of them differently. Router weights are float32.
//   logit   lane l of a warp has elements 4l .. 4l + 3, and so on 128 further, each fmaf(x, w, sum) from 0; then the tree of lanes
//   score   softmax over all experts (lane l adds experts l, l + 32, ...; then the tree) or sigmoid
//   choice  the ``used`` largest of score + bias, equal ones by the lowest id. With groups: a group's worth is the sum of its two largest,
//           and only experts of the groups_used best groups (equal ones: the first) can be chosen
//   weight  score (without the bias), divided by the sum of those chosen where normalised (no less than 2^-14), times scale
// Choices are ordered from the largest on. A row with a logit that is NaN has weights that are NaN, and ids that are valid.
//
// hidden float32 [count, width], router float32 [experts, width], bias float32 [experts]. Out: ids int32, weights float32 [count, used].
// logits float32 [count, experts]: scratch. arrived int32 [count / ROWS]: zero before and after. width is a multiple of 4, experts at most
// MAX_EXPERTS, used and groups at most 32. Grid: experts / 8 x count / ROWS blocks of 256; the last block of a tile of rows chooses.
//
// A *visit* is a row at one of its experts: visit v is row v / used with expert ids[v]. group_visits orders visits by expert, then number:
//   order  int32 [visits]
//   tiles  int4 [visits / tile + experts]: expert, first place in order, number of visits (at most ``tile``; 0: nothing to do), 0
// The tiles of expert e begin at (visits of earlier experts) / tile + e: there is room for them whatever the counts are, and no block needs
// to know another's. Grid: one block of 256 per expert.
#include "strata.cuh"
#include "select.cuh"

constexpr int MAX_EXPERTS = 512;
constexpr int WARPS = 8;
constexpr float LEAST_SUM = 6.103515625e-5f;

template <int ROWS> struct Memory {
  float per_warp[WARPS], scale[ROWS];
  u64 ranks[ROWS][MAX_EXPERTS];
  int is_last;
};

struct Router {
  const float* bias;
  int experts, used, groups, groups_used, sigmoid, normalised;
  float scale;
};

// A row's scores as functions of its logits: what softmax needs beyond the logit is found once.
struct Scores {
  const float* logits;
  float largest, total;
  int sigmoid;

  __device__ __forceinline__ float of(int expert) const {
    float logit = load_fresh(logits + expert);
    return sigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - largest) / total;
  }
};

__device__ __forceinline__ u64 warp_best(u64 rank) {
  for (int step = 16; step > 0; step /= 2) {
    u64 other = __shfl_xor_sync(ALL_LANES, rank, step);
    rank = other > rank ? other : rank;
  }
  return rank;
}

__device__ __forceinline__ int id_of(u64 rank) { return (int)~(u32)rank; }

// Takes the experts of all but the best groups out of the choice: their rank becomes 0.
__device__ __forceinline__ void keep_best_groups(const Router& r, const Scores& scores, u64* ranks) {
  int lane = lane_id(), size = r.experts / r.groups;
  float first = -INFINITY, second = -INFINITY;
  for (int i = 0; i < size && lane < r.groups; i++) {
    int expert = lane * size + i;
    float value = scores.of(expert) + (r.bias ? r.bias[expert] : 0.0f);
    second = fmaxf(second, fminf(first, value));
    first = fmaxf(first, value);
  }
  u64 mine = lane < r.groups ? rank_of(size > 1 ? first + second : first, lane) : 0;
  bool kept = false;
  for (int i = 0; i < r.groups_used; i++) {
    if (warp_best(mine) == mine && mine) kept = true, mine = 0;
  }
  u32 groups = __ballot_sync(ALL_LANES, kept);
  for (int expert = lane; expert < r.experts; expert += WARP)
    if (!(groups >> (expert / size) & 1)) ranks[expert] = 0;
}

// One warp, one row.
__device__ __forceinline__ void choose(const Router& r, const float* logits, u64* ranks, int* ids, float* weights) {
  int lane = lane_id();
  float largest = -INFINITY, total = 0.0f;
  bool nan = false;
  for (int expert = lane; expert < r.experts; expert += WARP) {
    float logit = load_fresh(logits + expert);
    largest = fmaxf(largest, logit);
    nan = nan || logit != logit;
  }
  bool broken = __ballot_sync(ALL_LANES, nan) != 0;
  largest = warp_max(largest);
  for (int expert = lane; expert < r.experts; expert += WARP) total += expf(load_fresh(logits + expert) - largest);
  Scores scores = {logits, largest, warp_sum(total), r.sigmoid};
  for (int expert = lane; expert < r.experts; expert += WARP)
    ranks[expert] = rank_of(scores.of(expert) + (r.bias ? r.bias[expert] : 0.0f), expert);
  if (r.groups > 1) keep_best_groups(r, scores, ranks);
  int chosen = 0;
  for (int i = 0; i < r.used; i++) {
    u64 best = 0;
    for (int expert = lane; expert < r.experts; expert += WARP) best = ranks[expert] > best ? ranks[expert] : best;
    int id = id_of(warp_best(best));
    if (lane == i) chosen = id;
    if (lane == id % WARP) ranks[id] = 0;  // no other lane looks at it
  }
  float weight = lane < r.used ? scores.of(chosen) : 0.0f, sum = warp_sum(weight);
  if (r.normalised) weight = weight / fmaxf(sum, LEAST_SUM);
  if (lane < r.used) {
    ids[lane] = chosen;
    weights[lane] = broken ? bits_float(0x7fc00000) : weight * r.scale;
  }
}

// The scales of the rows' norms, in the order of rms_norm.cu.
template <int ROWS>
__device__ __forceinline__ void norm_scales(const float* hidden, float eps, int first, int count, int width, Memory<ROWS>& shared) {
  for (int r = 0; r < ROWS; r++) {
    const float* row = hidden + (i64)min(first + r, count - 1) * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += row[i] * row[i];
    sum = block_sum(sum, shared.per_warp);
    if (threadIdx.x == 0) shared.scale[r] = 1.0f / sqrtf(sum / (float)width + eps);
  }
  __syncthreads();
}

template <int ROWS>
__device__ __forceinline__ void logits_of(const float* hidden, const float* gamma, const float* router, int first, int count, int width,
                                          const Memory<ROWS>& shared, float (&sum)[ROWS]) {
  for (int r = 0; r < ROWS; r++) sum[r] = 0.0f;
  for (int k = 4 * lane_id(); k < width; k += 4 * WARP) {
    float4 w = *(const float4*)(router + k), g = *(const float4*)(gamma + k);
    for (int r = 0; r < ROWS; r++) {
      float4 h = *(const float4*)(hidden + (i64)min(first + r, count - 1) * width + k);
      float scale = shared.scale[r];
      sum[r] = fmaf(h.x * scale * g.x, w.x, sum[r]);
      sum[r] = fmaf(h.y * scale * g.y, w.y, sum[r]);
      sum[r] = fmaf(h.z * scale * g.z, w.z, sum[r]);
      sum[r] = fmaf(h.w * scale * g.w, w.w, sum[r]);
    }
  }
  for (int r = 0; r < ROWS; r++) sum[r] = warp_sum(sum[r]);
}

template <int ROWS>
__global__ void __launch_bounds__(32 * WARPS) route(
    const float* hidden, const float* gamma, float eps, int count, int width, const float* router, const float* bias, int has_bias, int experts,
    int used, int groups, int groups_used, int sigmoid, int normalised, float scale, float* logits, int* arrived, int* ids, float* weights) {
  SHARED(Memory<ROWS>, shared);
  int first = blockIdx.y * ROWS, expert = blockIdx.x * WARPS + warp_id();
  norm_scales<ROWS>(hidden, eps, first, count, width, shared);
  if (expert < experts) {
    float sum[ROWS];
    logits_of<ROWS>(hidden, gamma, router + (i64)expert * width, first, count, width, shared, sum);
    for (int r = 0; r < ROWS; r++)
      if (lane_id() == 0 && first + r < count) logits[(i64)(first + r) * experts + expert] = sum[r];
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.is_last = atomicAdd(&arrived[blockIdx.y], 1) == (int)gridDim.x - 1;
  __syncthreads();
  if (!shared.is_last) return;
  if (threadIdx.x == 0) arrived[blockIdx.y] = 0;
  int r = warp_id(), row = first + r;
  if (r >= ROWS || row >= count) return;
  Router router_of = {has_bias ? bias : nullptr, experts, used, groups, groups_used, sigmoid, normalised, scale};
  choose(router_of, logits + (i64)row * experts, shared.ranks[r], ids + (i64)row * used, weights + (i64)row * used);
}

__device__ __forceinline__ int block_count(int value, int* per_warp) {
  int sum = warp_sum(value), total = 0;
  if (lane_id() == 0) per_warp[warp_id()] = sum;
  __syncthreads();
  for (int w = 0; w < num_warps(); w++) total += per_warp[w];
  __syncthreads();
  return total;
}

__global__ void __launch_bounds__(32 * WARPS) group_visits(const int* ids, int visits, int tile, int* order, int* tiles) {
  struct Shared { int per_warp[WARPS]; };
  SHARED(Shared, shared);
  int expert = blockIdx.x, before = 0, mine = 0;
  for (int v = threadIdx.x; v < visits; v += blockDim.x) before += ids[v] < expert, mine += ids[v] == expert;
  before = block_count(before, shared.per_warp);
  mine = block_count(mine, shared.per_warp);
  int first_tile = before / tile + expert, end_tile = (before + mine) / tile + expert + 1;
  for (int i = first_tile + threadIdx.x; i < end_tile; i += blockDim.x) {
    int first = before + (i - first_tile) * tile;
    ((int4*)tiles)[i] = int4{expert, first, max(0, min(tile, before + mine - first)), 0};
  }
  int at = before;
  for (int base = 0; base < visits; base += blockDim.x) {
    int v = base + threadIdx.x;
    bool is_mine = v < visits && ids[v] == expert;
    u32 lanes = __ballot_sync(ALL_LANES, is_mine);
    if (lane_id() == 0) shared.per_warp[warp_id()] = __popc(lanes);
    __syncthreads();
    int place = at + __popc(lanes & ((1u << lane_id()) - 1));
    for (int w = 0; w < num_warps(); w++) {
      if (w < warp_id()) place += shared.per_warp[w];
      at += shared.per_warp[w];
    }
    if (is_mine) order[place] = v;
    __syncthreads();
  }
}
