"""Runs windows on devices: the forward pass, its KV cache, sampling, and the pipeline of stages."""
