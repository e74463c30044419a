// From logits to tokens on the device: bias and penalties, top_k, top_p, min_p, the draw. One block per row; see strata/engine/sampling.py
// and filters.py, the twins, for the rules. No host round trip and no sort of the vocabulary.
//
// logits float32 [rows, vocab] (raw, not changed). adjusted float32 [rows, vocab]: scratch, used by rows with entries.
// real float64 [rows, 2]: temperature (below 1e-5: greedy), top_p.   ln_min_p float32 [rows]: -inf where off.
// whole uint32 [rows, 5]: seed low, seed high, choice, position, top_k (0: off).
// penalties float32 [rows, 3]: repetition, frequency, presence.   entries: first_entry int32 [rows + 1] into
//   entry_ints int32 [n, 3]: token (each at most once a row), times generated, 1 if seen in prompt or answer; entry_bias float32 [n].
// picks int32 [rows]: the token, or -1 for a row whose largest logit is NaN or infinite.
// DRAFT: logits are of the tokens vocabulary[0], vocabulary[1], ... (int32 [vocab]; entries name places in it), whose noise is drawn; and
//   sure float32 [rows]: the softmax of the raw logits at the pick, 0 for a broken row.
// top_p sums probabilities as integers of 2^-44, so the sum has no order.
#include "strata.cuh"
#include "philox.cuh"
#include "select.cuh"

constexpr int THREADS = 512, WARPS = THREADS / WARP;
constexpr double GREEDY_BELOW = 1e-5;
constexpr double NOISE_MAX = 22.8738;  // above the noise of the largest word, -log(-log(1 - 2^-33))

struct Best { double score; int id, bad; };

struct SampleMemory {
  Selection selection;
  Best of_warp[WARPS];
  float per_warp[WARPS];
  u64 total;
};

__device__ __forceinline__ Best better(const Best& a, const Best& b) {
  bool second = b.id >= 0 && (a.id < 0 || b.score > a.score || (b.score == a.score && b.id < a.id));
  return Best{second ? b.score : a.score, second ? b.id : a.id, a.bad | b.bad};
}

__device__ __forceinline__ Best block_best(Best best, Best* of_warp) {
  for (int step = 16; step > 0; step /= 2) {
    Best other = {__shfl_xor_sync(ALL_LANES, best.score, step), __shfl_xor_sync(ALL_LANES, best.id, step), __shfl_xor_sync(ALL_LANES, best.bad, step)};
    best = better(best, other);
  }
  if (lane_id() == 0) of_warp[warp_id()] = best;
  __syncthreads();
  best = of_warp[0];
  for (int w = 1; w < WARPS; w++) best = better(best, of_warp[w]);
  __syncthreads();
  return best;
}

__device__ __forceinline__ u64 mass_of(float logit, float best) { return (u64)((double)expf(logit - best) * 17592186044416.0); }

__device__ __forceinline__ const float* adjust(const float* logits, float* adjusted, int vocab, const float* penalties, const int* entry_ints,
                                               const float* entry_bias, int entries) {
  if (entries == 0) return logits;
  for (int i = threadIdx.x; i < vocab; i += THREADS) adjusted[i] = logits[i];
  __syncthreads();
  for (int i = threadIdx.x; i < entries; i += THREADS) {
    int token = entry_ints[3 * i], times = entry_ints[3 * i + 1];
    float value = logits[token] + entry_bias[i];
    if (entry_ints[3 * i + 2]) value = value > 0.0f ? value / penalties[0] : value * penalties[0];
    if (times > 0) value = value - penalties[1] * (float)times - penalties[2];
    adjusted[token] = value;
  }
  __syncthreads();
  return adjusted;
}

// The rank of the last token that top_k and top_p keep.
__device__ __forceinline__ u64 cut_of(const float* values, int vocab, float best, u32 top_k, double top_p, SampleMemory& shared) {
  u64 cut = NO_CUT;
  if (top_k > 0 && top_k < (u32)vocab) cut = select(values, vocab, NO_CUT, top_k, shared.selection, [](float) { return (u64)1; });
  if (top_p < 1.0) {
    if (threadIdx.x == 0) shared.total = 0;
    __syncthreads();
    u64 mine = 0;
    for (int i = threadIdx.x; i < vocab; i += THREADS)
      if (rank_of(values[i], i) >= cut) mine += mass_of(values[i], best);
    atomicAdd(&shared.total, mine);
    __syncthreads();
    u64 target = (u64)ceil(top_p * (double)shared.total);
    cut = select(values, vocab, cut, target > 0 ? target : 1, shared.selection, [best](float value) { return mass_of(value, best); });
  }
  return cut;
}

template <bool DRAFT>
__global__ void __launch_bounds__(THREADS, 1) sample(
    const float* logits, float* adjusted, int vocab, const double* real, const float* ln_min_p, const u32* whole, const float* penalties,
    const int* first_entry, const int* entry_ints, const float* entry_bias, const int* vocabulary, int* picks, float* sure) {
  SHARED(SampleMemory, shared);
  auto token_of = [vocabulary](int i) { return DRAFT ? vocabulary[i] : i; };
  i64 row = blockIdx.x;
  int first = first_entry[row], entries = first_entry[row + 1] - first;
  const float* values = adjust(logits + row * vocab, adjusted + row * vocab, vocab, penalties + 3 * row, entry_ints + 3 * first,
                               entry_bias + first, entries);
  Best best = {0.0, -1, 0};
  for (int i = threadIdx.x; i < vocab; i += THREADS) {
    float value = values[i];
    best = better(best, Best{(double)value, i, value != value});
  }
  best = block_best(best, shared.of_warp);
  float top = values[best.id];
  if (best.bad || top == INFINITY || top == -INFINITY) {
    if (threadIdx.x == 0) picks[row] = -1;
    if (DRAFT && threadIdx.x == 0) sure[row] = 0.0f;
    return;
  }
  const u32* w = whole + 5 * row;
  double temperature = real[2 * row];
  if (temperature >= GREEDY_BELOW) {
    u64 cut = cut_of(values, vocab, top, w[4], real[2 * row + 1], shared);
    float least = top + ln_min_p[row];
    // Noise is bounded: a token that cannot reach the total of the likeliest one even with the largest noise is passed over.
    double reach = temperature * ((double)top / temperature + gumbel(philox_first(w[3], token_of(best.id), w[1], 0, w[0], w[2])) - NOISE_MAX);
    reach -= 1e-9 * (1.0 + fabs(reach));
    Best drawn = {0.0, -1, 0};
    for (int i = threadIdx.x; i < vocab; i += THREADS) {
      float value = values[i];
      if ((double)value >= reach && value >= least && rank_of(value, i) >= cut)
        drawn = better(drawn, Best{(double)value / temperature + gumbel(philox_first(w[3], token_of(i), w[1], 0, w[0], w[2])), i, 0});
    }
    best = block_best(drawn, shared.of_warp);
  }
  if (threadIdx.x == 0) picks[row] = token_of(best.id);
  if (DRAFT) {
    const float* raw = logits + row * vocab;
    float most = -INFINITY, total = 0.0f;
    for (int i = threadIdx.x; i < vocab; i += THREADS) most = fmaxf(most, raw[i]);
    most = block_max(most, shared.per_warp);
    for (int i = threadIdx.x; i < vocab; i += THREADS) total += expf(raw[i] - most);
    total = block_sum(total, shared.per_warp);
    if (threadIdx.x == 0) sure[row] = expf(raw[best.id] - most) / total;
  }
}

// Natural log of the softmax of raw logits at tokens[row] (none where negative), and the best alternatives, ordered, equal ones by id.
// counts int32 [rows]: how many, at most room. chosen float64 [rows]; top_ids int32, top_logprobs float64 [rows, room].
__global__ void __launch_bounds__(THREADS, 1) logprobs(const float* logits, int vocab, const int* tokens, const int* counts, int room,
                                                    double* chosen, int* top_ids, double* top_logprobs) {
  struct Memory { SampleMemory sample; double of_warp[WARPS]; };
  SHARED(Memory, shared);
  i64 row = blockIdx.x;
  const float* values = logits + row * vocab;
  Best best = {0.0, -1, 0};
  for (int i = threadIdx.x; i < vocab; i += THREADS) best = better(best, Best{(double)values[i], i, 0});
  best = block_best(best, shared.sample.of_warp);
  double sum = 0.0;
  for (int i = threadIdx.x; i < vocab; i += THREADS) sum += exp((double)values[i] - best.score);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
  if (lane_id() == 0) shared.of_warp[warp_id()] = sum;
  __syncthreads();
  double total = 0.0;
  for (int w = 0; w < WARPS; w++) total += shared.of_warp[w];
  double base = best.score + log(total);
  if (threadIdx.x == 0 && tokens[row] >= 0) chosen[row] = (double)values[tokens[row]] - base;
  int wanted = min(min(counts[row], room), vocab);
  u64 last = ~0ull;
  for (int n = 0; n < wanted; n++) {  // few: each pass takes the best rank below the last one
    Best next = {0.0, -1, 0};
    for (int i = threadIdx.x; i < vocab; i += THREADS)
      if (rank_of(values[i], i) < last) next = better(next, Best{(double)values[i], i, 0});
    next = block_best(next, shared.sample.of_warp);
    last = rank_of(values[next.id], next.id);
    if (threadIdx.x == 0) top_ids[row * room + n] = next.id, top_logprobs[row * room + n] = next.score - base;
  }
}
