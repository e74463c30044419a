// Runs a kernel's thread blocks on one CPU thread: every CUDA thread is a fiber with its own stack.
//
// Blocks run one after the other. A fiber runs until it reaches a barrier or a warp collective, then the next ready fiber of
// its warp runs, then the next warp: ascending or descending, so that a race shows as a difference between the two orders.
// Shared memory is filled with 0xff (a NaN in every float format) before each block, so that a missing barrier or
// initialisation reads NaN and not the right value the block before left there.
// A barrier that some live thread never reaches stops the launch with a message; it does not hang and does not abort.
// Not modelled: blocks or warps really running at once, memory ordering, spin waits (a block that waits for another hangs).
// One launch at a time per process: the state below is global, and the Python side holds a lock.
#pragma once

// STRATA_UCONTEXT: switch by the system's calls also where this file knows the machine (about 100 times slower; for the tests).
#if defined(__x86_64__) && !defined(STRATA_UCONTEXT)
#define STRATA_OWN_SWITCH
#else
#include <ucontext.h>
#endif
#include <stdio.h>

namespace fibers {

constexpr int MAX_THREADS = 1024;
constexpr int STACK_BYTES = 32 * 1024 + 320;  // the odd 320: equal offsets of two stacks must not meet in one cache set
constexpr int SHARED_BYTES = 48 * 1024;
constexpr u64 CANARY = 0x5374726174614661ull;

struct Dim { u32 x, y, z; };

enum Wait { RUNNING, DONE, BLOCK_BARRIER, SYNC, SHUFFLE, REDUCE, MMA };
static const char* const WAIT_NAMES[] = {"running", "done", "a block barrier", "__syncwarp", "a shuffle", "a warp reduction", "mma"};

struct Fiber {
#ifdef STRATA_OWN_SWITCH
  void* stack_pointer;
#else
  ucontext_t context;
#endif
  Dim index;
  int lane, warp;
  Wait wait;
};

struct Warp {
  u32 alive, ready, arrived;
  u64 deposit[WARP], result[WARP];  // deposit: written on the way in; result: read on the way out, before the next collective ends
  u32 fragment[WARP][16];           // operands and results of an mma
};

struct Launch {  // mirrored by strata/devices/emulated.py
  u32 grid[3];
  u32 block;
  u32 descending;
  char* stacks;     // MAX_THREADS * STACK_BYTES
  char* message;    // 256 bytes, filled when the launch fails
};

// Inline, not static: of a static variable the compiler believes to see every write, and a switch of stacks is one that it does not.
inline Fiber all[MAX_THREADS];
inline Fiber host;
inline Warp warps[MAX_THREADS / WARP];
inline Fiber* current;
inline Dim block_index, block_size, grid_size;
inline int threads_alive, threads_at_barrier;
inline bool descending;
inline Launch* launch;
inline bool failed;
inline void (*body)(void**);
inline void** arguments;
alignas(128) inline char shared_memory[SHARED_BYTES];

template <class T> static inline T& shared() {
  static_assert(sizeof(T) <= SHARED_BYTES, "more shared memory than every architecture has without asking");
  return *reinterpret_cast<T*>(shared_memory);
}

#ifdef STRATA_OWN_SWITCH
// Saves what the compiler is not told to save itself (everything is clobbered but rbp and rbx) and resumes another stack.
static inline __attribute__((always_inline)) void switch_to(Fiber* from, Fiber* to) {
  void** save = &from->stack_pointer;
  void** load = &to->stack_pointer;
  asm volatile(
      "pushq %%rbp\n\tpushq %%rbx\n\tleaq 1f(%%rip), %%rax\n\tpushq %%rax\n\tmovq %%rsp, (%0)\n\t"
      "movq (%1), %%rsp\n\tpopq %%rax\n\tjmpq *%%rax\n\t"
      "1:\n\tpopq %%rbx\n\tpopq %%rbp\n\t"
      : "+D"(save), "+S"(load)
      :
      : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3",
        "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
}

static void fiber_main();

static inline void prepare(Fiber* fiber, char* stack) {
  void** top = reinterpret_cast<void**>((reinterpret_cast<u64>(stack) + STACK_BYTES) & ~15ull);
  *--top = nullptr;  // the address fiber_main would return to: keeps the alignment of a call
  *--top = reinterpret_cast<void*>(fiber_main);
  fiber->stack_pointer = top;
}
#else
static inline void switch_to(Fiber* from, Fiber* to) { swapcontext(&from->context, &to->context); }

static void fiber_main();

static inline void prepare(Fiber* fiber, char* stack) {
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = stack + 64;
  fiber->context.uc_stack.ss_size = STACK_BYTES - 64;
  makecontext(&fiber->context, fiber_main, 0);
}
#endif

static inline int first_lane(u32 lanes) { return descending ? 31 - __builtin_clz(lanes) : __builtin_ctz(lanes); }

// The next ready fiber: later lanes of this warp, its earlier lanes, then the other warps in turn ("later" by the order chosen).
static inline Fiber* next_ready() {
  int lane = current->lane, num_warps = (block_size.x + WARP - 1) / WARP;
  u32 ready = warps[current->warp].ready;
  u32 later = descending ? ready & ((1u << lane) - 1) : ready & ~((2u << lane) - 1);
  if (later | ready) return &all[current->warp * WARP + first_lane(later ? later : ready)];
  for (int i = 1; i <= num_warps; i++) {
    int warp = (current->warp + (descending ? num_warps - i : i)) % num_warps;
    if (warps[warp].ready) return &all[warp * WARP + first_lane(warps[warp].ready)];
  }
  return nullptr;
}

[[noreturn]] static inline void stop_launch() {
  failed = true;
  for (;;) switch_to(current, &host);
}

[[noreturn]] static inline void report_deadlock() {
  int counts[7] = {0};
  for (u32 i = 0; i < block_size.x; i++) counts[all[i].wait]++;
  int used = snprintf(launch->message, 256, "deadlock in block (%u, %u, %u):", block_index.x, block_index.y, block_index.z);
  for (int wait = DONE; wait <= MMA && used < 200; wait++) {
    if (counts[wait]) used += snprintf(launch->message + used, 256 - used, " %d threads %s %s;", counts[wait],
                                       wait == DONE ? "are" : "wait at", WAIT_NAMES[wait]);
  }
  stop_launch();
}

static __attribute__((noinline)) void give_way() {
  Fiber* before = current;
  Fiber* next = next_ready();
  if (!next) report_deadlock();
  if (next == before) return;
  current = next;
  switch_to(before, next);
}

static inline void release_block() {
  threads_at_barrier = 0;
  for (u32 warp = 0; warp * WARP < block_size.x; warp++) warps[warp].ready = warps[warp].alive;
}

static inline void block_barrier() {
  Fiber* self = current;
  self->wait = BLOCK_BARRIER;
  if (++threads_at_barrier == threads_alive) {
    release_block();
  } else {
    warps[self->warp].ready &= ~(1u << self->lane);
    give_way();
  }
  self->wait = RUNNING;
}

// All live lanes of the warp meet; the last to come runs finish(warp) for all of them.
template <class Finish> static inline void collective(Wait kind, Finish finish) {
  Fiber* self = current;
  Warp& warp = warps[self->warp];
  u32 bit = 1u << self->lane;
  self->wait = kind;
  for (u32 rest = warp.arrived; rest; rest &= rest - 1) {
    Wait other = all[self->warp * WARP + __builtin_ctz(rest)].wait;
    if (other != kind) {
      snprintf(launch->message, 256, "divergent warp %d in block (%u, %u, %u): one lane is at %s, another at %s", self->warp,
               block_index.x, block_index.y, block_index.z, WAIT_NAMES[kind], WAIT_NAMES[other]);
      stop_launch();
    }
    break;
  }
  warp.arrived |= bit;
  if (warp.arrived == warp.alive) {
    warp.arrived = 0;
    finish(warp);
    warp.ready = warp.alive;
  } else {
    warp.ready &= ~bit;
    give_way();
  }
  self->wait = RUNNING;
}

// Every lane gives a value of at most 8 bytes and sees those of all lanes (a lane that has ended: what it gave last).
template <class T> static inline const u64* gather(T value) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  Warp& warp = warps[current->warp];
  u64 bits = 0;
  memcpy(&bits, &value, sizeof(T));
  warp.deposit[current->lane] = bits;
  collective(SHUFFLE, [](Warp& w) { memcpy(w.result, w.deposit, sizeof(w.result)); });
  return warp.result;
}

template <class T> static inline T exchange(T value, int from) {
  T got;
  memcpy(&got, &gather(value)[from & (WARP - 1)], sizeof(T));
  return got;
}

// The tree of adjacent pairs, pairs of pairs, ...: what a butterfly of shuffles with steps 1, 2, 4, 8, 16 leaves in every lane.
template <class T, class Combine> static inline T reduce(T value, Combine combine) {
  Warp& warp = warps[current->warp];
  memcpy(&warp.deposit[current->lane], &value, sizeof(T));
  collective(REDUCE, [&](Warp& w) {
    T level[WARP];
    for (int i = 0; i < WARP; i++) memcpy(&level[i], &w.deposit[i], sizeof(T));
    for (int count = WARP / 2; count > 0; count /= 2)
      for (int i = 0; i < count; i++) level[i] = combine(level[2 * i], level[2 * i + 1]);
    memcpy(&w.result[0], &level[0], sizeof(T));
  });
  T total;
  memcpy(&total, &warp.result[0], sizeof(T));
  return total;
}

static void fiber_main() {
  for (;;) {
    body(arguments);
    Fiber* self = current;
    Warp& warp = warps[self->warp];
    self->wait = DONE;
    warp.alive &= ~(1u << self->lane);
    warp.ready &= ~(1u << self->lane);
    threads_alive--;
    Fiber* next = &host;
    if (threads_alive > 0) {
      if (threads_at_barrier == threads_alive) release_block();
      next = next_ready();
      if (!next) report_deadlock();
      current = next;
    }
    switch_to(self, next);
  }
}

static inline void start_block(u32 x, u32 y, u32 z) {
  block_index = {x, y, z};
  memset(shared_memory, 0xff, sizeof(shared_memory));
  threads_alive = block_size.x;
  threads_at_barrier = 0;
  u32 num_warps = (block_size.x + WARP - 1) / WARP;
  for (u32 w = 0; w < num_warps; w++) {
    u32 lanes = block_size.x - w * WARP;
    warps[w].alive = warps[w].ready = lanes >= WARP ? ALL_LANES : (1u << lanes) - 1;
    warps[w].arrived = 0;
  }
  for (u32 i = 0; i < block_size.x; i++) all[i].wait = RUNNING;
  current = &all[descending ? block_size.x - 1 : 0];
  switch_to(&host, current);
}

// Runs every block of a launch; 0, or 1 with launch->message saying what went wrong.
static inline int run(Launch* request, void (*kernel_body)(void**), void** kernel_arguments) {
  launch = request;
  body = kernel_body;
  arguments = kernel_arguments;
  descending = request->descending != 0;
  grid_size = {request->grid[0], request->grid[1], request->grid[2]};
  block_size = {request->block, 1, 1};
  failed = false;
  for (u32 i = 0; i < request->block; i++) {
    char* stack = request->stacks + (u64)i * STACK_BYTES;
    memcpy(stack, &CANARY, sizeof(CANARY));
    all[i].index = {i, 0, 0};
    all[i].lane = i % WARP;
    all[i].warp = i / WARP;
    prepare(&all[i], stack);
  }
  for (u32 z = 0; z < grid_size.z && !failed; z++)
    for (u32 y = 0; y < grid_size.y && !failed; y++)
      for (u32 x = 0; x < grid_size.x && !failed; x++) start_block(x, y, z);
  for (u32 i = 0; i < request->block && !failed; i++) {
    if (memcmp(request->stacks + (u64)i * STACK_BYTES, &CANARY, sizeof(CANARY)) != 0) {
      snprintf(request->message, 256, "thread %u used more than the %d bytes of its stack", i, STACK_BYTES);
      failed = true;
    }
  }
  return failed;
}

}  // namespace fibers

static inline int lane_of_fiber() { return fibers::current->lane; }
