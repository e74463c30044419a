"""Every metric of the server: ``METRICS`` is the one list, with kind, meaning, unit and labels; docs and tests read it too.

Rules. Where vLLM has a metric it carries vLLM's name, meaning, labels and buckets, so that existing dashboards work; the rest
is ``strata_*``. Label values come from fixed sets, never from a request. A metric with ``read`` is computed at the scrape from a
picture of the slot machine or of the server, so no gauge goes stale and no scraper disturbs another; the others are counted.
A request is counted once, when it ends, however it ends; only generated tokens and the times between them count as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric as Family
from prometheus_client.exposition import choose_encoder

from strata.messages import Usage

EndReason = Literal["stop", "length", "abort", "error"]
END_REASONS: tuple[EndReason, ...] = ("stop", "length", "abort", "error")
REFUSALS = ("queue_full", "loading", "draining", "engine_dead", "context", "too_large", "access", "engine", "other")
OPENMETRICS, TEXT = "application/openmetrics-text; version=1.0.0", "text/plain; version=0.0.4"
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
    """One metric. ``name`` as in the table of vLLM (a counter's samples end in ``_total``). ``label``: its one label, if any, and
    ``values`` what it can say (empty: set by the code, as the route templates are). ``read``: its value, or values by label, from
    the picture of ``source``; with ``is_info`` the value is 1 and what is read are the labels."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    unit: str = ""
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    read: Callable[[Any], float | Mapping[str, Any]] | None = None
    source: Literal["machine", "server", "engine", "build"] = "machine"
    is_info: bool = False

    @property
    def is_vllm(self) -> bool:
        return self.name.startswith("vllm:")


def _slots_by_state(view: Any) -> Mapping[str, float]:
    counts = dict.fromkeys(SLOT_STATES, 0)
    for slot in view.slots:
        counts[slot.state] += 1
    return counts


SLOT_STATES = ("empty", "held", "restoring", "reading", "decoding", "leaving")

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
    # vLLM's, counted.
    Metric("vllm:prompt_tokens", "counter", "Prompt tokens of ended requests, read or taken from held history.", "tokens"),
    Metric("vllm:prompt_tokens_cached", "counter", "Prompt tokens of ended requests that were taken from held history.", "tokens"),
    Metric("vllm:generation_tokens", "counter", "Tokens generated.", "tokens"),
    Metric("vllm:prefix_cache_queries", "counter", "Prompt tokens looked for in held history.", "tokens"),
    Metric("vllm:prefix_cache_hits", "counter", "Prompt tokens found in held history.", "tokens"),
    Metric("vllm:spec_decode_num_draft_tokens", "counter", "Tokens drafted.", "tokens"),
    Metric("vllm:spec_decode_num_accepted_tokens", "counter", "Drafted tokens that were accepted.", "tokens"),
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


class Metrics:
    """The counters of one server, in a registry of its own, with those of the process (Linux). ``view``, ``server`` and
    ``engine`` make the pictures for the scrape; None while there is none."""

    def __init__(self, model_name: str, version: str = "", view: Callable[[], Any] | None = None) -> None:
        self.view = view
        self.server: Callable[[], Any] | None = None
        self.engine: Callable[[], Any] | None = None
        self._build = {"version": version, "model_name": model_name}
        self._fixed = {"model_name": model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._counters: dict[str, Any] = {}
        self._histograms: dict[str, Any] = {}
        for each in METRICS:
            if each.read is None:
                self._register(each)
        self._registry.register(self)
        self._generated = self._counters["vllm:generation_tokens"]
        self._token_gap = self._histograms["vllm:inter_token_latency_seconds"]

    def _register(self, metric: Metric) -> None:
        fixed = self._fixed if metric.is_vllm else {}
        own = ("route", "status") if metric.label == "route" else tuple(filter(None, (metric.label,)))
        names = (*fixed, *own)
        if metric.kind == "histogram":
            histogram = Histogram(metric.name, metric.help, names, registry=self._registry, buckets=metric.buckets)
            self._histograms[metric.name] = histogram.labels(**fixed) if fixed else histogram
            return
        counter = Counter(metric.name, metric.help, names, registry=self._registry)
        self._counters[metric.name] = counter.labels(**fixed) if fixed and not own else counter
        for value in metric.values:
            counter.labels(**fixed, **{metric.label: value})

    def know_routes(self, routes: Iterable[str]) -> None:
        """Make the series of these routes, at 0: Prometheus sees no increase from nothing to 1."""
        for route in routes:
            for status in ("2xx", "4xx", "5xx"):
                self._counters["strata_http_requests"].labels(route=route, status=status)

    # ---------------------------------------------------------------- what happens

    def first_token(self, seconds: float) -> None:
        self._histograms["vllm:time_to_first_token_seconds"].observe(seconds)

    def next_tokens(self, seconds: float) -> None:
        """Tokens came ``seconds`` after the ones before."""
        self._token_gap.observe(seconds)

    def generated(self, tokens: int) -> None:
        self._generated.inc(tokens)

    def request_ended(self, reason: EndReason, usage: Usage, generated: int, seconds: float) -> None:
        """One choice of a request ended ``seconds`` after its arrival, with ``generated`` tokens given to the client."""
        self._counters["vllm:request_success"].labels(**self._fixed, finished_reason=reason).inc()
        for name in ("vllm:prompt_tokens", "vllm:prefix_cache_queries"):
            self._counters[name].inc(usage.prompt)
        for name in ("vllm:prompt_tokens_cached", "vllm:prefix_cache_hits"):
            self._counters[name].inc(usage.cached)
        self._counters["vllm:spec_decode_num_draft_tokens"].inc(usage.drafted)
        self._counters["vllm:spec_decode_num_accepted_tokens"].inc(usage.accepted)
        for name, value in (
            ("vllm:e2e_request_latency_seconds", seconds),
            ("vllm:request_queue_time_seconds", usage.queue_s),
            ("vllm:request_prefill_time_seconds", usage.prompt_s),
            ("vllm:request_decode_time_seconds", usage.decode_s),
            ("vllm:request_prompt_tokens", usage.prompt),
            ("vllm:request_generation_tokens", generated),
        ):
            self._histograms[name].observe(value)

    def refused(self, reason: str) -> None:
        """A request was answered with an error; ``reason`` is one of ``REFUSALS``."""
        self._counters["strata_refused"].labels(reason=reason).inc()

    def loop_lag(self, seconds: float) -> None:
        self._histograms["strata_loop_lag_seconds"].observe(seconds)

    def http_request(self, route: str, status: int, seconds: float) -> None:
        """``status`` 0: the client left before there was one."""
        status_class = f"{status // 100}xx" if status else "gone"
        self._counters["strata_http_requests"].labels(route=route, status=status_class).inc()
        self._histograms["strata_http_request_seconds"].observe(seconds)

    # ---------------------------------------------------------------- the scrape

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics where ``accept`` asks for it, else Prometheus text."""
        content_type = OPENMETRICS if "application/openmetrics-text" in accept else TEXT
        # Any other escaping would make an underscore of the colon in vLLM's names (prometheus_client 0.26).
        encode, _ = choose_encoder(f"{content_type}; escaping=allow-utf-8")
        return encode(_Plain(self._registry)), f"{content_type}; charset=utf-8"

    def collect(self) -> Iterator[Family]:
        """What is computed at the scrape (the registry calls this)."""
        pictures: dict[str, Any] = {"build": self._build}
        makers = {"machine": self.view, "server": self.server, "engine": self.engine}
        pictures |= {source: make() for source, make in makers.items() if make is not None}
        for metric in METRICS:
            if metric.read is not None and metric.source in pictures:
                yield self._family(metric, metric.read(pictures[metric.source]))

    def _family(self, metric: Metric, value: float | Mapping[str, Any]) -> Family:
        if metric.is_info:
            assert isinstance(value, Mapping)
            info = GaugeMetricFamily(metric.name, metric.help, labels=list(value))
            info.add_metric(list(value.values()), 1)
            return info
        fixed = self._fixed if metric.is_vllm else {}
        kind: Any = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=[*fixed, *filter(None, (metric.label,))])
        for label, number in value.items() if isinstance(value, Mapping) else (("", value),):
            family.add_metric([*fixed.values(), *filter(None, (label,))], number)
        return family


class _Plain:
    """A registry without the ``_created`` series, which double the exposition and which nobody reads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Family]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
