"""Write docs/METRICS.md, the reference of every metric, from the table in strata/metric_table.py.

    python tools/make_metrics_doc.py > docs/METRICS.md

A test compares the two, so the page cannot say what the server does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from strata.metric_table import CONFIG_LABELS, METRICS, STATUS_CLASSES, Metric  # noqa: E402  # found by the line above

HEAD = """# Metrics

<!-- Made from strata/metric_table.py by `python tools/make_metrics_doc.py > docs/METRICS.md`; do not edit. -->

`GET /metrics` answers in the Prometheus text format, or in OpenMetrics where the Accept header asks for it. Where API keys are
set it needs one, like every other route. `configs/monitoring/` has rules, alerts and a Grafana dashboard made of these names.

- Names of vLLM (`vllm:...`) mean what they mean there and have its labels and buckets, so panels made for them work. The rest is
  `strata_...`.
- Label values come from fixed sets, so the number of series does not grow with the requests, whatever they contain.
- Gauges are computed when they are read, so none is stale. There are no rates: `rate(vllm:generation_tokens_total[1m])` is the
  speed in tokens per second, and two scrapers do not disturb each other.
- A request is counted once, when it ends, however it ends: an aborted one is in every total and histogram that a finished one is
  in. Only generated tokens, the gaps between them and drafts count as they come.
- What describes slots, pages and the queue is absent while the model loads. `strata_build_info` (labels `version`, `model_name`) and
  `strata_config_info` (labels @CONFIG@) are always 1 and tell what was set, 0 and auto as such.
- Of a GPU, `strata_gpu_...` is there where NVIDIA's driver is (it is asked at each scrape, for 50 ms at most); `device` is the number or
  name of the setting `devices`.
- On Linux the usual `process_...` metrics are there too: memory, processor time, open files, time of the start.
"""

QUERIES = (
    ("How fast is it, in all?", "sum(rate(vllm:generation_tokens_total[1m]))"),
    (
        "How long until the first token, for 19 of 20 requests?",
        "histogram_quantile(0.95, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[5m])))",
    ),
    (
        "How much of the prompts was already held?",
        "sum(rate(vllm:prefix_cache_hits_total[5m])) / sum(rate(vllm:prefix_cache_queries_total[5m]))",
    ),
    (
        "How many drafts are accepted?",
        "sum(rate(vllm:spec_decode_num_accepted_tokens_total[5m])) / sum(rate(vllm:spec_decode_num_draft_tokens_total[5m]))",
    ),
    (
        "How many drafts are accepted in a window that has some?",
        "sum(rate(vllm:spec_decode_num_accepted_tokens_total[5m])) / sum(rate(vllm:spec_decode_num_drafts_total[5m]))",
    ),
    (
        "How many rows share a decode window?",
        "sum(rate(strata_decode_rows_total[5m])) / sum(rate(strata_decode_windows_total[5m]))",
    ),
    (
        "Which share of the requests failed?",
        'sum(rate(vllm:request_success_total{finished_reason="error"}[5m])) / sum(rate(vllm:request_success_total[5m]))',
    ),
)


def exposed(metric: Metric) -> str:
    """The name as /metrics has it; a histogram's is the name without _bucket, _sum and _count."""
    return f"{metric.name}_total" if metric.kind == "counter" else metric.name


def labels(metric: Metric) -> str:
    """Its own labels with their values; a label without listed values takes them from the program, never from a request."""
    if metric.label == "route":
        return f"`route`: the route's template<br>`status`: {_listed(STATUS_CLASSES)}"
    if not metric.label:
        return ""
    return f"`{metric.label}`: {_listed(metric.values)}" if metric.values else f"`{metric.label}`"


def _listed(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def table(metrics: Iterable[Metric]) -> str:
    lines = ["| metric | kind | unit | meaning | labels |", "|---|---|---|---|---|"]
    lines += [f"| `{exposed(each)}` | {each.kind} | {each.unit} | {each.help} | {labels(each)} |" for each in metrics]
    return "\n".join(lines) + "\n"


def buckets() -> str:
    """Each set of upper bounds once, with the histograms that have it."""
    users: dict[tuple[float, ...], list[str]] = {}
    for each in METRICS:
        if each.buckets:
            users.setdefault(each.buckets, []).append(each.name)
    rows = [f"| {_listed(names)} | {', '.join(f'{bound:g}' for bound in bounds)} |" for bounds, names in users.items()]
    return "\n".join(["| histograms | upper bounds of the buckets |", "|---|---|", *rows]) + "\n"


def queries() -> str:
    return "\n".join(["| question | query |", "|---|---|", *(f"| {question} | `{query}` |" for question, query in QUERIES)]) + "\n"


def page() -> str:
    vllm, own = [each for each in METRICS if each.is_vllm], [each for each in METRICS if not each.is_vllm]
    head = HEAD.replace("@CONFIG@", _listed(CONFIG_LABELS))
    return (
        f"{head}\n## vLLM's names\n\nEvery one also has the labels `model_name` (the name the server goes by) and `engine` (`0`).\n\n"
        f"{table(vllm)}\n## Strata's own\n\n{table(own)}\n## Buckets\n\n{buckets()}\n## Questions and queries\n\n{queries()}"
    )


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]  # the same bytes on Windows
    sys.stdout.write(page())
