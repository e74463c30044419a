"""The slow twins: what each kernel computes, in NumPy, in the order of operations that its source documents.

Where NumPy can round as the kernel does, a twin is exact to the bit; where it cannot (exp, the fused multiply-add by way of
float64), the test that uses it says how far apart they may be.
"""

import numpy as np

from strata.weights.layouts import integers, padded, scales_and_offsets

f32 = np.float32


def fma(a, b, c):
    """float32 fused multiply-add. float64 holds the product exactly; the sum is rounded twice, which differs once in 2**29 sums or so."""
    return (a.astype(np.float64) * b.astype(np.float64) + c).astype(f32)


def tree(values, axis=-1):
    """The sum by adjacent pairs, pairs of pairs, and so on, along a power of two."""
    values = np.moveaxis(values, axis, -1)
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def quantize(x):
    """float32 [rows, columns] -> (codes int8 [rows, width], meta uint32 [rows, width / 32, 2])."""
    rows, columns = x.shape
    padded_x = np.zeros((rows, padded(columns)), f32)
    padded_x[:, :columns] = x
    groups = padded_x.reshape(rows, -1, 32)
    largest = np.abs(groups).max(axis=2)
    inverse = np.divide(f32(127), largest, where=largest > 0, out=np.zeros_like(largest))
    codes = np.rint(groups * inverse[..., None]).astype(np.int8)
    meta = np.zeros((rows, codes.shape[1], 2), np.uint32)
    meta[..., 0] = (largest / f32(127)).view(np.uint32)
    sums = codes.reshape(rows, -1, 2, 16).sum(axis=3).astype(np.int16)
    meta[..., 1] = np.ascontiguousarray(sums).view(np.uint32)[..., 0]
    return codes.reshape(rows, -1), meta


def expand_activations(codes, meta):
    """The values that codes stand for."""
    scales = np.ascontiguousarray(meta[..., 0]).view(f32)
    return (codes.reshape(*scales.shape, 32) * scales[..., None]).reshape(codes.shape)


def product(tensor, codes, meta):
    """float32 [count, rows] in the order of cuda_src/include/product.cuh. Not for half."""
    layout = tensor.layout
    size = layout.group
    weights = integers(tensor).reshape(tensor.rows, -1, size)
    scales, offsets = scales_and_offsets(tensor)
    x = codes.astype(np.int32).reshape(len(codes), -1, size)
    dots = np.einsum("ngk,mgk->mng", weights, x).astype(f32)
    sums = x.sum(axis=2).astype(f32)
    activation = np.repeat(np.ascontiguousarray(meta[..., 0]).view(f32), 32 // size, axis=1)
    groups_per_pair = 64 // size
    chains = np.zeros((len(codes), tensor.rows, 32), f32)
    for group in range(dots.shape[2]):
        chain = group // groups_per_pair % 32
        factor = scales[None, :, group] * activation[:, None, group]
        chains[..., chain] = fma(factor, dots[..., group], chains[..., chain])
        if layout.affine:
            factor = offsets[None, :, group] * activation[:, None, group]
            chains[..., chain] = fma(factor, np.broadcast_to(sums[:, None, group], factor.shape), chains[..., chain])
    return tree(chains)


def rms_norm(x, gamma, eps):
    """float32 [rows, columns], in the order of rms_norm.cu: 256 strided sums, a tree over lanes, warps one after the other."""
    columns = x.shape[1]
    squares = np.zeros((len(x), -(-columns // 256) * 256), f32)
    squares[:, :columns] = x * x
    threads = np.zeros((len(x), 256), f32)
    for step in squares.reshape(len(x), -1, 256).swapaxes(0, 1):
        threads += step
    total = np.zeros(len(x), f32)
    for warp in tree(threads.reshape(len(x), 8, 32)).T:
        total += warp
    scale = f32(1) / np.sqrt(total / f32(columns) + f32(eps))
    return x * scale[:, None] * gamma
