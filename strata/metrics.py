"""The counters of a server and what Prometheus is told: the metrics of metric_table.py, counted here or read at the scrape.

A request is counted once, when it ends, however it ends; only generated tokens, the times between them and drafts count as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric as Family
from prometheus_client.exposition import choose_encoder

from strata.messages import Usage
from strata.metric_table import METRICS, EndReason, Metric

OPENMETRICS, TEXT = "application/openmetrics-text; version=1.0.0", "text/plain; version=0.0.4"


class Metrics:
    """The counters of one server, in a registry of its own, with those of the process (Linux). ``view``, ``server``, ``engine``
    and ``devices`` make the pictures for the scrape; None while there is none."""

    def __init__(self, model_name: str, version: str = "", view: Callable[[], Any] | None = None) -> None:
        self.view = view
        self.server: Callable[[], Any] | None = None
        self.engine: Callable[[], Any] | None = None
        self.devices: Callable[[], Any] | None = None
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
        for name, value in (
            ("vllm:e2e_request_latency_seconds", seconds),
            ("vllm:request_queue_time_seconds", usage.queue_s),
            ("vllm:request_prefill_time_seconds", usage.prompt_s),
            ("vllm:request_decode_time_seconds", usage.decode_s),
            ("vllm:request_prompt_tokens", usage.prompt),
            ("vllm:request_generation_tokens", generated),
        ):
            self._histograms[name].observe(value)

    def corrupted(self) -> None:
        """A request ended because a row of its logits was not finite."""
        self._counters["vllm:corrupted_requests"].inc()

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
        makers = {"machine": self.view, "server": self.server, "engine": self.engine, "devices": self.devices}
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
