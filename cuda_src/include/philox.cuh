// Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011), standard constants: the first output word of a counter under a key.
// strata/engine/philox.py is its NumPy twin and says how noise is made of it.
#pragma once

__device__ __forceinline__ u32 philox_first(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
  for (int round = 0; round < 10; round++) {
    u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// -log(-log(u)), u = (word + 0.5) / 2^32
__device__ __forceinline__ double gumbel(u32 word) { return -log(-log(((double)word + 0.5) * (1.0 / 4294967296.0))); }
