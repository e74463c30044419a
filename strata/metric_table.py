"""Every metric of the server in one list: kind, meaning, unit, labels, and where its value is read. Docs and tests read it too.

Rules. Where vLLM has a metric it carries vLLM's name, meaning, labels and buckets, so that existing dashboards work; the rest
is ``strata_*``. Label values come from fixed sets, never from a request. A metric with ``read`` is computed at the scrape from a
picture of one of the sources, so no gauge goes stale and no scraper disturbs another; the others are counted (metrics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

EndReason = Literal["stop", "length", "abort", "error"]
END_REASONS: tuple[EndReason, ...] = ("stop", "length", "abort", "error")
REFUSALS = ("queue_full", "loading", "draining", "engine_dead", "context", "too_large", "access", "engine", "other")
# The settings that strata_config_info shows, with the context as it is served.
CONFIG_LABELS = ("device", "batch", "batch_groups", "rows", "context", "kv", "chunk", "spec", "deterministic", "shelf")
STATUS_CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx", "gone")

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
TOKEN_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


@dataclass(frozen=True)
class Metric:
    """One metric.

    ``name`` as in the table of vLLM (a counter's samples end in ``_total``). ``label``: its one label, if any, and ``values`` what it
    can say (empty: set by the code, as the route templates are). ``read``: its value, or values by label, from the picture of
    ``source`` (``engine``: StageTimes of each stage; ``devices``: DeviceView of each); with ``is_info`` the value is 1 and what is
    read are the labels.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    unit: str = ""
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    read: Callable[[Any], float | Mapping[str, Any]] | None = None
    source: Literal["machine", "server", "engine", "devices", "build"] = "machine"
    is_info: bool = False

    @property
    def is_vllm(self) -> bool:
        return self.name.startswith("vllm:")


def _slots_by_state(view: Any) -> Mapping[str, float]:
    counts = dict.fromkeys(SLOT_STATES, 0)
    for slot in view.slots:
        counts[slot.state] += 1
    return counts


def _by_device(attribute: str) -> Callable[[Any], Mapping[str, float]]:
    """Values by device name, of the devices that have one."""

    def read(devices: Any) -> Mapping[str, float]:
        return {device.name: value for device in devices if (value := getattr(device, attribute)) is not None}

    return read


def _drafts_wanted(view: Any) -> Mapping[str, float]:
    return {source: sum(slot.wanted[place] for slot in view.slots) for place, source in enumerate(DRAFT_SOURCES)}


SLOT_STATES = ("empty", "held", "restoring", "reading", "decoding", "leaving")
DRAFT_SOURCES = ("mtp", "lookup")

METRICS: tuple[Metric, ...] = (
    # vLLM's, from the machine's picture.
    Metric("vllm:num_requests_running", "gauge", "Requests that have a slot.", "requests", read=lambda view: view.running),
    Metric("vllm:num_requests_waiting", "gauge", "Requests that wait for a slot, preempted ones included.", "requests",
           read=lambda view: view.waiting + view.preempted),
    Metric(
        "vllm:kv_cache_usage_perc", "gauge", "Share of the KV pages that running requests need; 1 is all of them.", "ratio",
        read=lambda view: view.pages_busy / max(1, view.pages_total),
    ),
    Metric(
        "vllm:num_preemptions", "counter", "Times a request lost its slot and went on later.", "times",
        read=lambda view: view.counters.preemptions,
    ),
    Metric("vllm:spec_decode_num_drafts", "counter", "Times that a slot had drafts checked.", "times",
           read=lambda view: view.counters.drafts),
    Metric("vllm:spec_decode_num_draft_tokens", "counter", "Drafts that were checked.", "tokens",
           read=lambda view: sum(view.counters.drafted.values())),
    Metric("vllm:spec_decode_num_accepted_tokens", "counter",
           "Drafts that were right; each is a token of an answer, or lies behind its stop string.", "tokens",
           read=lambda view: sum(view.counters.accepted.values())),
    Metric("vllm:spec_decode_num_accepted_tokens_per_pos", "counter", "Drafts that were right, by their place among the drafts from 0.",
           "tokens", "position", read=lambda view: {str(place): count for place, count in enumerate(view.counters.accepted_at)}),
    # vLLM's, counted.
    Metric("vllm:prompt_tokens", "counter", "Prompt tokens of ended requests, read or taken from held history.", "tokens"),
    Metric("vllm:prompt_tokens_cached", "counter", "Prompt tokens of ended requests that were taken from held history.", "tokens"),
    Metric("vllm:generation_tokens", "counter", "Tokens generated.", "tokens"),
    Metric("vllm:prefix_cache_queries", "counter", "Prompt tokens looked for in held history.", "tokens"),
    Metric("vllm:prefix_cache_hits", "counter", "Prompt tokens found in held history.", "tokens"),
    Metric("vllm:corrupted_requests", "counter", "Requests that ended because their logits were not finite numbers.", "requests"),
    Metric("vllm:request_success", "counter", "Ended requests by reason.", "requests", "finished_reason", END_REASONS),
    Metric("vllm:time_to_first_token_seconds", "histogram", "From a request's arrival to its first token.", "seconds", buckets=FIRST_TOKEN),
    Metric("vllm:inter_token_latency_seconds", "histogram", "Between two deliveries of tokens.", "seconds", buckets=TOKEN_GAP),
    Metric("vllm:e2e_request_latency_seconds", "histogram", "From a request's arrival to its end.", "seconds", buckets=LATENCY),
    Metric("vllm:request_queue_time_seconds", "histogram", "Waiting for a slot.", "seconds", buckets=LATENCY),
    Metric("vllm:request_prefill_time_seconds", "histogram", "From the slot to the first token.", "seconds", buckets=LATENCY),
    Metric("vllm:request_decode_time_seconds", "histogram", "From the first token to the last.", "seconds", buckets=LATENCY),
    Metric("vllm:request_prompt_tokens", "histogram", "Prompt tokens of a request.", "tokens", buckets=TOKENS),
    Metric("vllm:request_generation_tokens", "histogram", "Generated tokens of a request.", "tokens", buckets=TOKENS),
    # Slots, pages, queue.
    Metric("strata_slots", "gauge", "Slots by state.", "slots", "state", SLOT_STATES, read=_slots_by_state),
    Metric("strata_queue_depth", "gauge", "Requests in the queue, preempted ones included.", "requests",
           read=lambda view: view.waiting + view.preempted),
    Metric(
        "strata_pages", "gauge", "KV pages of the device pool by who needs them; the states add up to the pool.", "pages",
        "state", ("free", "busy", "held", "shelved"),
        read=lambda view: {
            "free": view.pages_free, "busy": view.pages_busy, "held": view.pages_held, "shelved": view.pages_shelved,
        },
    ),
    Metric("strata_page_tokens", "gauge", "Positions in one KV page.", "tokens", read=lambda view: view.page_tokens),
    Metric("strata_held_tokens", "gauge", "Tokens of history that a next turn can use.", "tokens", read=lambda view: view.tokens_held),
    Metric(
        "strata_conversations", "gauge", "Conversations kept without a slot: on the device, in host memory.", "conversations",
        "place", ("shelved", "parked"), read=lambda view: {"shelved": view.shelved, "parked": view.parked},
    ),
    Metric("strata_parked_bytes", "gauge", "Host memory that parked conversations take.", "bytes", read=lambda view: view.parked_bytes),
    Metric("strata_parked_limit_bytes", "gauge", "Host memory they may take.", "bytes", read=lambda view: view.parked_limit),
    Metric(
        "strata_reuse", "counter", "Requests given a slot, by where their history came from.", "requests",
        "kind", ("continued", "borrowed", "restored", "none"), read=lambda view: view.counters.reuse,
    ),
    Metric(
        "strata_evictions", "counter", "Histories lost for good, by reason.", "conversations",
        "reason", ("seat", "memory", "shelf_full", "host_full", "copy_failed", "error"), read=lambda view: view.counters.evictions,
    ),
    Metric("strata_chunks", "counter", "Prompt chunks read.", "chunks", read=lambda view: view.counters.chunks),
    Metric("strata_chunk_tokens", "counter", "Tokens in them.", "tokens", read=lambda view: view.counters.chunk_tokens),
    Metric("strata_decode_windows", "counter", "Decode windows run.", "windows", read=lambda view: view.counters.decode_windows),
    Metric("strata_decode_rows", "counter", "Rows in them, drafts included.", "rows", read=lambda view: view.counters.decode_rows),
    Metric("strata_pad_rows", "counter", "Rows of them that computed for nobody.", "rows", read=lambda view: view.counters.pad_rows),
    Metric("strata_draft_tokens", "counter", "Drafts that were checked, by who gave them.", "tokens", "source", DRAFT_SOURCES,
           read=lambda view: view.counters.drafted),
    Metric("strata_draft_accepted_tokens", "counter", "Those of them that were right.", "tokens", "source", DRAFT_SOURCES,
           read=lambda view: view.counters.accepted),
    Metric("strata_draft_seconds", "counter", "Time of the last stage that went into drafting; a part of its busy time.", "seconds",
           read=lambda view: view.counters.draft_seconds),
    Metric("strata_drafts_wanted", "gauge",
           "Drafts that all slots together ask for now; 0 where none decodes, or drafting was found to lose.", "tokens",
           "source", DRAFT_SOURCES, read=_drafts_wanted),
    Metric("strata_windows_in_flight", "gauge", "Windows in the engine.", "windows", read=lambda view: view.windows_in_flight),
    Metric("strata_batch_groups", "gauge", "Groups of slots with decode windows of their own; 1: all slots share one window.", "groups",
           read=lambda view: view.groups),
    Metric("strata_stage_busy_seconds", "counter", "Time in which a stage of the pipeline had work.", "seconds", "stage", source="engine",
           read=lambda stages: {str(number): stage.busy for number, stage in enumerate(stages)}),
    Metric("strata_stage_wait_seconds", "counter", "Time in which it had none.", "seconds", "stage", source="engine",
           read=lambda stages: {str(number): stage.wait for number, stage in enumerate(stages)}),
    Metric("strata_stage_windows", "counter", "Windows it has run.", "windows", "stage", source="engine",
           read=lambda stages: {str(number): stage.windows for number, stage in enumerate(stages)}),
    Metric("strata_engine_up", "gauge", "1 while the engine runs, 0 once it has stopped for good.", "",
           read=lambda view: 0 if view.dead else 1),
    Metric(
        "strata_conversation_moves", "counter", "Conversations that lost their slot, went to host memory, came back from it.", "moves",
        "kind", ("unseated", "parked", "restored"),
        read=lambda view: {kind: getattr(view.counters, kind) for kind in ("unseated", "parked", "restored")},
    ),
    # Devices; what only a GPU's driver says is absent without one.
    Metric("strata_device_weights_bytes", "gauge", "Memory planned for weights.", "bytes", "device", source="devices",
           read=_by_device("weights")),
    Metric("strata_device_kv_bytes", "gauge", "Memory planned for keys and values; the CPU takes it as it is used.", "bytes", "device",
           source="devices", read=_by_device("kv")),
    Metric("strata_device_work_bytes", "gauge", "Memory planned for windows and graphs; on the CPU about.", "bytes", "device",
           source="devices", read=_by_device("work")),
    Metric("strata_gpu_memory_bytes", "gauge", "Memory of the GPU.", "bytes", "device", source="devices", read=_by_device("total")),
    Metric("strata_gpu_memory_free_bytes", "gauge", "What no process uses of it.", "bytes", "device", source="devices",
           read=_by_device("free")),
    Metric("strata_gpu_utilization_ratio", "gauge", "Share of the last moments in which the GPU computed; 1 is always.", "ratio", "device",
           source="devices", read=_by_device("utilization")),
    Metric("strata_gpu_temperature_celsius", "gauge", "Temperature of the GPU.", "celsius", "device", source="devices",
           read=_by_device("temperature")),
    Metric("strata_gpu_power_watts", "gauge", "Power the GPU draws.", "watts", "device", source="devices", read=_by_device("power")),
    # The process and HTTP.
    Metric("strata_ready", "gauge", "1 while new work is taken, as /ready says.", source="server", read=lambda server: server.is_ready),
    Metric("strata_build_info", "gauge", "1; the labels name version and model.", source="build", is_info=True, read=lambda build: build),
    Metric("strata_config_info", "gauge", "1; the labels are the settings that decide about speed.", source="server", is_info=True,
           read=lambda server: server.config),
    Metric("strata_queue_limit", "gauge", "Requests that may wait.", "requests", source="server", read=lambda server: server.queue_limit),
    Metric("strata_host_memory_bytes", "gauge", "Memory of the machine (Linux).", "bytes", "kind", ("total", "available"),
           source="server", read=lambda server: server.memory),
    Metric("strata_http_connections", "gauge", "Open connections.", "connections", source="server", read=lambda server: server.connections),
    Metric("strata_loop_lag_seconds", "histogram", "How late a timer of the event loop is, once a second.", "seconds", buckets=LAG),
    Metric("strata_refused", "counter", "Requests answered with an error, by reason.", "requests", "reason", REFUSALS),
    Metric("strata_http_requests", "counter", "HTTP requests by route template and status class (gone: the client left).", "requests",
           "route"),
    Metric("strata_http_request_seconds", "histogram", "From a request's head to the end of its answer.", "seconds", buckets=LATENCY),
)
