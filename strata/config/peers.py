"""What llama.cpp, vLLM and SGLang call the settings of this server, for the error that an unknown name gives.

Hints, not aliases: a name that is taken in silence would have to mean the same, and few do (llama.cpp's --ctx-size is what all slots
share, its --batch-size counts rows). Without them the nearest spelling is named, and for --ctx-size that is --queue-size.
"""

from __future__ import annotations

# By setting: the peers' names, long and short, without dashes in front and with underscores.
_NAMES: dict[str, tuple[str, ...]] = {
    "model": ("m", "model_path"),
    "model_name": ("a", "alias", "served_model_name"),
    "mtp": ("md", "model_draft", "speculative_model", "speculative_draft_model", "speculative_draft_model_path"),
    "device": ("ngl", "gpu_layers", "n_gpu_layers"),
    "devices": ("mg", "main_gpu", "tp", "tp_size", "tensor_parallel_size", "pp", "pp_size", "pipeline_parallel_size"),
    "layer_split": ("sm", "split_mode", "ts", "tensor_split"),
    "threads": ("t", "tb", "threads_batch"),
    "context": ("c", "ctx_size", "context_length", "max_model_len"),
    "kv": ("ctk", "cache_type_k", "ctv", "cache_type_v", "kv_cache_dtype"),
    "kv_memory_mib": ("gpu_memory_utilization", "mem_fraction_static", "max_total_tokens", "kv_cache_memory_bytes"),
    "chunk": ("b", "batch_size", "ub", "ubatch_size", "max_num_batched_tokens", "chunked_prefill_size"),
    "spec": ("draft", "draft_n", "draft_max", "num_speculative_tokens", "speculative_num_steps", "speculative_num_draft_tokens",
             "speculative_config", "speculative_algorithm"),
    "batch": ("np", "n_parallel", "max_num_seqs", "max_running_requests"),
    "conversation_cache_mib": ("cram", "cache_ram", "swap_space", "kv_offloading_size", "hicache_size"),
    "queue_size": ("max_queued_requests",),
    "cors_origins": ("allowed_origins",),
    "temperature": ("temp",),
    "repetition_penalty": ("repeat_penalty",),
}
OURS: dict[str, str] = {peer: name for name, peers in _NAMES.items() for peer in peers}
