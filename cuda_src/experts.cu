// Products of rows with the experts that each was routed to (route.cu), whose ids are read here and nowhere else.
//
// A matrix holds all experts' weights, expert e in rows e * rows .. (e + 1) * rows - 1. A visit is a row at one of its experts. Every
// product is the one of product.cuh; a row's outputs are summed over its visits, from the first to the last: fmaf(weight, product, sum) from
// 0, then the shared expert's output. Visits one by one and visits grouped by expert are two ways to the same bits.
//
// Visits one by one (few rows):
//   expert_swiglu   activations [visits, rows] = silu(gate) * up; grid: rows / 32 x visits
//   expert_down     y float32 [count, rows], summed; grid: rows / DOWN_ROWS x count
//   LANES lanes make a product, see row_product.cuh: the width has at most so many pairs, or LANES is 32.
// Grouped, on the matrix units; a tile is up to 8 * TILES visits of one expert, one that is empty does nothing:
//   grouped_swiglu  as expert_swiglu; grid: rows / 32 x tiles
//   grouped_down    part float32 [visits, rows], not summed; grid: rows / 16 x tiles
//   fold_visits     y from part; grid: rows / 256 x count
//
// codes, meta: activations [count, width], or of expert_down and grouped_down [visits, width]. ids int32, weights float32 [count, used].
// shared_out float32 [count, rows] where has_shared; y may be the same buffer.
#include "strata.cuh"
#include "product.cuh"
#include "row_product.cuh"
#include "tile_product.cuh"

constexpr int DOWN_ROWS = 8, DOWN_PAIRS = DOWN_ROWS / 2;
constexpr int MAX_USED = 32;

#define EXPERTS(n) const u8 *weight_codes##n, const u16 *weight_scales##n, const u8 *weight_steps##n, float unit##n

// Pairs of rows whose weights a lane loads at once: more of larger codes would take more registers than two blocks leave each other.
template <class Codes> constexpr int AT_ONCE = 1;
template <> constexpr int AT_ONCE<NibbleCodes> = 2;

template <class A, class B, int LANES>
__global__ void __launch_bounds__(THREADS, 2) expert_swiglu(
    EXPERTS(0), EXPERTS(1), const u32* grid, int rows, int width, const i8* codes, const u32* meta, const int* ids, int used, i8* out_codes,
    u32* out_meta, int out_width) {
  struct Shared { u32 grid[GRID_WORDS<A, B, none>]; float tile[1][64]; };
  SHARED(Shared, shared);
  Weights gate = WEIGHTS(0, A), up = WEIGHTS(1, B);
  int visit = blockIdx.y;
  i64 row = visit / used, first = (i64)ids[visit] * rows + blockIdx.x * 32;
  Activations x = {codes + row * width, meta + row * (width / 16), width};
  constexpr int UNITS = THREADS / LANES, UNROLLED = AT_ONCE<typename A::Codes>;
#pragma unroll UNROLLED
  for (int item = threadIdx.x / LANES; item < 32; item += UNITS) {  // pairs of rows: 16 of gate, then 16 of up; a warp has one kind
    int at = 2 * (item % 16), is_up = item / 16;
    float sum[2][1];
    if (is_up) dot_rows<B, 1, LANES>(up, x, 1, first + at, first + at + 1, sum);
    else dot_rows<A, 1, LANES>(gate, x, 1, first + at, first + at + 1, sum);
    if (lane_id() % LANES == 0) shared.tile[0][2 * at + is_up] = sum[0][0], shared.tile[0][2 * at + 2 + is_up] = sum[1][0];
  }
  __syncthreads();
  swiglu_tile<1>(shared.tile, nullptr, nullptr, 1, visit, visit + 1, out_codes, out_meta, out_width);
}

// A row's visits into one sum: product(visit of the row) for each, then the shared expert's output.
template <class Product>
__device__ __forceinline__ float fold(const float* weights, int used, const float* shared_out, Product product) {
  float sum = 0.0f;
  for (int i = 0; i < used; i++) sum = fmaf(weights[i], product(i), sum);
  return shared_out ? sum + *shared_out : sum;
}

template <class L, int LANES>
__global__ void __launch_bounds__(THREADS, 2) expert_down(
    EXPERTS(0), const u32* grid, int rows, int width, const i8* codes, const u32* meta, const int* ids, const float* weights, int used,
    const float* shared_out, int has_shared, float* y) {
  struct Shared { u32 grid[L::Codes::GRID]; float tile[MAX_USED][DOWN_ROWS]; };
  SHARED(Shared, shared);
  Weights w = WEIGHTS(0, L);
  i64 first = (i64)blockIdx.y * used;
  constexpr int UNITS = THREADS / LANES;
  int items = used * DOWN_PAIRS;
  for (int base = 0; base < items; base += UNITS) {
    int item = min(base + (int)threadIdx.x / LANES, items - 1), i = item / DOWN_PAIRS, at = 2 * (item % DOWN_PAIRS);
    int row0 = min((int)blockIdx.x * DOWN_ROWS + at, rows - 1), row1 = min(row0 + 1, rows - 1);
    i64 expert = (i64)ids[first + i] * rows, visit = first + i;
    float sum[2][1];
    dot_rows<L, 1, LANES>(w, Activations{codes + visit * width, meta + visit * (width / 16), width}, 1, expert + row0, expert + row1, sum);
    if (lane_id() % LANES == 0) shared.tile[i][at] = sum[0][0], shared.tile[i][at + 1] = sum[1][0];
  }
  __syncthreads();
  int row = blockIdx.x * DOWN_ROWS + threadIdx.x;
  if (threadIdx.x >= DOWN_ROWS || row >= rows) return;
  i64 to = (i64)blockIdx.y * rows + row;
  y[to] = fold(weights + first, used, has_shared ? shared_out + to : nullptr, [&](int i) { return shared.tile[i][threadIdx.x]; });
}

// The activations of a tile's visits. divide: visits that share a row, 1 where each has its own.
struct Visitors {
  Activations x;
  const int* visits;
  int divide;

  __device__ __forceinline__ const u32* row_codes(int column) const { return x.row_codes(visits[column] / divide); }
  __device__ __forceinline__ const uint4* row_meta(int column) const { return x.row_meta(visits[column] / divide); }
};

// A tile and, in shared memory, its visits. False where there is nothing to do.
__device__ __forceinline__ bool take_tile(const int* tiles, const int* order, int4& tile, int* visits) {
  tile = ((const int4*)tiles)[blockIdx.y];
  if (tile.z == 0) return false;
  for (int i = threadIdx.x; i < tile.z; i += THREADS) visits[i] = order[tile.y + i];
  __syncthreads();
  return true;
}

template <class A, class B, int TILES>
__global__ void __launch_bounds__(THREADS, 1) grouped_swiglu(
    EXPERTS(0), EXPERTS(1), const u32* grid, int rows, int width, const i8* codes, const u32* meta, const int* order, const int* tiles, int used,
    i8* out_codes, u32* out_meta, int out_width) {
  struct Shared { u32 grid[GRID_WORDS<A, B, none>]; Reduction<TILES> reduction; float tile[8 * TILES][64]; int visits[8 * TILES]; };
  SHARED(Shared, shared);
  int4 tile;
  if (!take_tile(tiles, order, tile, shared.visits)) return;
  Weights gate = WEIGHTS(0, A), up = WEIGHTS(1, B);
  Visitors x = {Activations{codes, meta, width}, shared.visits, used};
  int end = (tile.x + 1) * rows;
  for (int step = 0; step < 32 / TILE_ROWS; step++) {
    int row = tile.x * rows + blockIdx.x * 32 + step * TILE_ROWS, at = 2 * step * TILE_ROWS;
    multiply_tile<A, TILES, 64>(gate, x, end, row, 0, tile.z, shared.reduction, shared.tile, at, 2);
    multiply_tile<B, TILES, 64>(up, x, end, row, 0, tile.z, shared.reduction, shared.tile, at + 1, 2);
  }
  swiglu_tile<8 * TILES>(shared.tile, nullptr, nullptr, 1, 0, tile.z, out_codes, out_meta, out_width, shared.visits);
}

template <class L, int TILES>
__global__ void __launch_bounds__(THREADS, 1) grouped_down(
    EXPERTS(0), const u32* grid, int rows, int width, const i8* codes, const u32* meta, const int* order, const int* tiles, float* part) {
  struct Shared { u32 grid[L::Codes::GRID]; Reduction<TILES> reduction; float tile[8 * TILES][TILE_ROWS]; int visits[8 * TILES]; };
  SHARED(Shared, shared);
  int4 tile;
  if (!take_tile(tiles, order, tile, shared.visits)) return;
  Weights w = WEIGHTS(0, L);
  Visitors x = {Activations{codes, meta, width}, shared.visits, 1};
  int first = blockIdx.x * TILE_ROWS;
  multiply_tile<L, TILES, TILE_ROWS>(w, x, (tile.x + 1) * rows, tile.x * rows + first, 0, tile.z, shared.reduction, shared.tile, 0);
  for (int i = threadIdx.x; i < TILE_ROWS * tile.z; i += THREADS) {
    int r = i % TILE_ROWS, c = i / TILE_ROWS;
    if (first + r < rows) part[(i64)shared.visits[c] * rows + first + r] = shared.tile[c][r];
  }
}

__global__ void __launch_bounds__(THREADS) fold_visits(const float* part, const float* weights, int used, int rows, const float* shared_out,
                                                       int has_shared, float* y) {
  int row = blockIdx.x * THREADS + threadIdx.x;
  i64 first = (i64)blockIdx.y * used, to = (i64)blockIdx.y * rows + row;
  if (row >= rows) return;
  y[to] = fold(weights + first, used, has_shared ? shared_out + to : nullptr, [&](int i) { return part[(first + i) * rows + row]; });
}
