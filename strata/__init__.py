"""Strata: a single-process asyncio LLM server on raw CUDA, with slots, stages and the model's own drafts."""

__version__ = "0.1.0"
