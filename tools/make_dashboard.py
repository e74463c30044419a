"""Write the Grafana dashboard of configs/monitoring from the short description below.

    python tools/make_dashboard.py > configs/monitoring/grafana/dashboards/strata.json

A panel is one line or two here and seventy in Grafana's JSON. Edit here, not in Grafana: a test compares the two. Rates use
Grafana's ``$__rate_interval``, so no panel shows gaps or depends on the scrape interval; nothing needs the recording rules.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

WIDTH = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SELECTED = 'job="strata",instance=~"$instance"'
FAILED = 'finished_reason="error"'
Json = dict[str, Any]
Query = tuple[str, str]  # expression, legend


# ---------------------------------------------------------------- expressions


def now(name: str, where: str = "") -> str:
    return f"{name}{{{','.join(filter(None, (SELECTED, where)))}}}"


def total(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} ({now(name)})"


def rate(name: str, by: str = "", where: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({now(name, where)}[$__rate_interval]))"


def share(part: str, whole: str, by: str = "") -> str:
    """Of two counters, over the same time."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def mean(histogram: str) -> str:
    return share(f"{histogram}_sum", f"{histogram}_count")


def percentiles(histogram: str, *quantiles: int) -> list[Query]:
    buckets = rate(f"{histogram}_bucket", by="le")
    return [(f"histogram_quantile({quantile / 100:g}, {buckets})", f"p{quantile}") for quantile in quantiles or (50, 95, 99)]


BUSY = rate("strata_stage_busy_seconds_total", by="stage")


# ---------------------------------------------------------------- panels


@dataclass(frozen=True)
class Panel:
    """``unit`` as Grafana names units; ``shape``: lines, stack or number; ``reads``: what it tells, for the tooltip."""

    title: str
    reads: str
    unit: str
    queries: list[Query]
    shape: str = "lines"

    @property
    def size(self) -> tuple[int, int]:
        return (3, 4) if self.shape == "number" else (8, 8)


PANELS: dict[str, list[Panel]] = {
    "Overview": [
        Panel("Model", "Model and version that answer.", "none", [(now("strata_build_info"), "{{model_name}} {{version}}")], "number"),
        Panel("Ready", "Servers that take work (see strata_engine_up for those whose engine has died).", "none",
              [(total("strata_ready"), "ready"), (total("strata_engine_up"), "engines")], "number"),
        Panel("Running", "Requests that have a slot.", "none", [(total("vllm:num_requests_running"), "running")], "number"),
        Panel("Waiting", "Requests in the queue, preempted ones included.", "none", [(total("strata_queue_depth"), "waiting")], "number"),
        Panel("Generated", "Tokens a second, all answers together.", "none", [(rate("vllm:generation_tokens_total"), "tok/s")], "number"),
        Panel("Held prompt", "Share of the prompt tokens that were taken from held history.", "percentunit",
              [(share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), "held")], "number"),
        Panel("KV in use", "Share of the KV pages that running requests need (the fullest server).", "percentunit",
              [(f"max ({now('vllm:kv_cache_usage_perc')})", "busy")], "number"),
        Panel("Errors", "Share of the requests that ended by an error.", "percentunit",
              [(f"{rate('vllm:request_success_total', where=FAILED)} / {rate('vllm:request_success_total')}", "failed")], "number"),
        Panel("Time to first token", "From a request's arrival: waiting, then reading what was not held.", "s",
              percentiles("vllm:time_to_first_token_seconds")),
        Panel("Gap between tokens", "Between two deliveries of one answer; long prompts of others make the peaks.", "s",
              percentiles("vllm:inter_token_latency_seconds")),
        Panel("Request duration", "From arrival to end, aborted and failed ones included.", "s",
              percentiles("vllm:e2e_request_latency_seconds")),
        Panel("Tokens per second", "Generated, and prompt tokens of ended requests.", "none", [
            (rate("vllm:generation_tokens_total"), "generated"), (rate("vllm:prompt_tokens_total"), "prompt"),
        ]),
        Panel("Speed of one answer", "Tokens a second that one client sees after the first, on average.", "none",
              [(share("vllm:request_generation_tokens_sum", "vllm:request_decode_time_seconds_sum"), "tok/s")]),
        Panel("Ended requests per minute", "By reason: stop and length are whole answers, abort means the client left.", "none",
              [(f"60 * {rate('vllm:request_success_total', by='finished_reason')}", "{{finished_reason}}")], "stack"),
    ],
    "Slots and KV": [
        Panel("Slots", "By state. Held: a conversation waits there for its next turn.", "none",
              [(total("strata_slots", by="state"), "{{state}}")], "stack"),
        Panel("Queue", "Requests that wait; more than there are slots means a wait of a whole answer each.", "none", [
            (total("strata_queue_depth"), "all"), (total("vllm:num_requests_waiting"), "not yet begun"),
        ]),
        Panel("Time in the queue", "Until a slot was given.", "s", percentiles("vllm:request_queue_time_seconds")),
        Panel("KV pages", "Free, needed by running requests, held in slots, or shelved without a slot.", "none",
              [(total("strata_pages", by="state"), "{{state}}")], "stack"),
        Panel("Prompt tokens per second", "Taken from held history, and read.", "none", [
            (rate("vllm:prompt_tokens_cached_total"), "held"),
            (f"{rate('vllm:prompt_tokens_total')} - {rate('vllm:prompt_tokens_cached_total')}", "read"),
        ], "stack"),
        Panel("Share of the prompts that was held", "Drops when clients change the start of their prompts, or there is no room.",
              "percentunit", [(share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), "held")]),
        Panel("Where histories came from", "Requests a minute: continued in place, pages borrowed, restored from host memory, none.",
              "none", [(f"60 * {rate('strata_reuse_total', by='kind')}", "{{kind}}")], "stack"),
        Panel("Histories lost per minute", "By reason; shelf_full, host_full, memory and seat mean want of room.", "none",
              [(f"60 * {rate('strata_evictions_total', by='reason')}", "{{reason}}")], "stack"),
        Panel("Preemptions per minute", "Running requests that lost their slot; any at all means too little KV memory.", "none",
              [(f"60 * {rate('vllm:num_preemptions_total')}", "preempted")]),
        Panel("Held tokens", "Tokens of history on the devices that a next turn can use.", "none",
              [(total("strata_held_tokens"), "tokens")]),
        Panel("Conversations without a slot", "Shelved on the device, parked in host memory.", "none",
              [(total("strata_conversations", by="place"), "{{place}}")], "stack"),
        Panel("Conversations moved per minute", "Out of a slot, out to host memory, and back.", "none",
              [(f"60 * {rate('strata_conversation_moves_total', by='kind')}", "{{kind}}")], "stack"),
        Panel("Host memory of parked conversations", "What they take and may take.", "bytes", [
            (total("strata_parked_bytes"), "used"), (total("strata_parked_limit_bytes"), "limit"),
        ]),
    ],
    "Pipeline": [
        Panel("Windows per second", "Decode windows and prompt chunks.", "none", [
            (rate("strata_decode_windows_total"), "decode"), (rate("strata_chunks_total"), "prompt chunks"),
        ]),
        Panel("Rows per decode window", "What one pass over the weights serves, drafts included; pad rows serve nobody.", "none", [
            (share("strata_decode_rows_total", "strata_decode_windows_total"), "rows"),
            (share("strata_pad_rows_total", "strata_decode_windows_total"), "pad rows"),
        ]),
        Panel("Work of the stages", "Share of the time in which each stage of the layer split had work; the busiest one sets the pace.",
              "percentunit", [(f"{BUSY} / ({BUSY} + {rate('strata_stage_wait_seconds_total', by='stage')})", "stage {{stage}}")]),
        Panel("Windows of the stages per second", "Equal, unless a stage loses windows.", "none",
              [(rate("strata_stage_windows_total", by="stage"), "stage {{stage}}")]),
        Panel("Groups", "Groups of slots with windows of their own; 1 where one window for all is faster.", "none",
              [(now("strata_batch_groups"), "groups")]),
        Panel("Tokens per prompt chunk", "Small chunks mean short prompts, or a small --chunk.", "none",
              [(share("strata_chunk_tokens_total", "strata_chunks_total"), "tokens")]),
        Panel("Windows in flight", "In the engine at the moment of the scrape.", "none", [(total("strata_windows_in_flight"), "windows")]),
        Panel("Where a request's time goes", "Mean seconds of ended requests.", "s", [
            (mean("vllm:request_queue_time_seconds"), "queue"),
            (mean("vllm:request_prefill_time_seconds"), "prompt"),
            (mean("vllm:request_decode_time_seconds"), "decode"),
        ], "stack"),
        Panel("Size of requests", "Mean tokens of ended requests.", "none", [
            (mean("vllm:request_prompt_tokens"), "prompt"), (mean("vllm:request_generation_tokens"), "answer"),
        ]),
    ],
    "Machine": [
        Panel("Memory of the machine", "Total and available (Linux).", "bytes",
              [(f"max by (kind) ({now('strata_host_memory_bytes')})", "{{kind}}"),
               (total("process_resident_memory_bytes"), "this server")]),
        Panel("Processor seconds per second", "Of the server's processes (Linux).", "none",
              [(rate("process_cpu_seconds_total", by="instance"), "{{instance}}")]),
        Panel("Memory planned on the devices", "Weights, keys and values, windows and graphs.", "bytes", [
            (total("strata_device_weights_bytes", by="device"), "{{device}} weights"),
            (total("strata_device_kv_bytes", by="device"), "{{device}} KV"),
            (total("strata_device_work_bytes", by="device"), "{{device}} work"),
        ], "stack"),
        Panel("Memory of the GPUs", "All of it, and what no process uses.", "bytes", [
            (total("strata_gpu_memory_bytes", by="device"), "{{device}} all"),
            (total("strata_gpu_memory_free_bytes", by="device"), "{{device}} free"),
        ]),
        Panel("Use of the GPUs", "Share of the time in which a GPU computed anything at all.", "percentunit",
              [(f"avg by (device) ({now('strata_gpu_utilization_ratio')})", "{{device}}")]),
        Panel("Temperature of the GPUs", "Above some 85 degrees they slow down.", "celsius",
              [(f"max by (device) ({now('strata_gpu_temperature_celsius')})", "{{device}}")]),
        Panel("Power of the GPUs", "As drawn at the moment of the scrape.", "watt",
              [(total("strata_gpu_power_watts", by="device"), "{{device}}")], "stack"),
    ],
    "Drafting": [
        Panel("Drafts per second", "Tokens drafted, and those of them that the model itself would have picked.", "none", [
            (rate("strata_draft_tokens_total", by="source"), "{{source}}"),
            (rate("strata_draft_accepted_tokens_total", by="source"), "{{source}} accepted"),
        ]),
        Panel("Acceptance", "Accepted of drafted tokens. Drafts never change an answer, only its speed.", "percentunit", [
            (share("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"), "all"),
            (share("strata_draft_accepted_tokens_total", "strata_draft_tokens_total", by="source"), "{{source}}"),
        ]),
        Panel("Acceptance by place", "Of all windows with drafts, those in which the first, second, ... was right.", "percentunit", [
            (f"{rate('vllm:spec_decode_num_accepted_tokens_per_pos_total', by='position')}"
             f" / scalar({rate('vllm:spec_decode_num_drafts_total')})", "{{position}}"),
        ]),
        Panel("Drafts wanted", "None when idle, or where they lose.", "none", [(total("strata_drafts_wanted", by="source"), "{{source}}")]),
        Panel("Time for drafting", "Seconds of the last stage per second.", "none", [(rate("strata_draft_seconds_total"), "seconds")]),
        Panel("Tokens that drafts brought", "Share of the generated tokens that came as accepted drafts.", "percentunit",
              [(share("vllm:spec_decode_num_accepted_tokens_total", "vllm:generation_tokens_total"), "of all tokens")]),
    ],
    "HTTP": [
        Panel("Requests per minute by route", "Probes and scrapes included.", "none",
              [(f"60 * {rate('strata_http_requests_total', by='route')}", "{{route}}")], "stack"),
        Panel("Requests per minute by status", "gone: the client left before there was a status.", "none",
              [(f"60 * {rate('strata_http_requests_total', by='status')}", "{{status}}")], "stack"),
        Panel("Duration of HTTP requests", "From the head of the request to the end of the answer, all routes.", "s",
              percentiles("strata_http_request_seconds")),
        Panel("Open connections", "At the moment of the scrape.", "none", [(total("strata_http_connections"), "open")]),
        Panel("Broken logits per minute", "Requests that met numbers that are not finite; any at all is a fault.", "none",
              [(f"60 * {rate('vllm:corrupted_requests_total')}", "requests")]),
        Panel("Refusals per minute", "Requests that were not taken, by reason.", "none",
              [(f"60 * {rate('strata_refused_total', by='reason')}", "{{reason}}")], "stack"),
        Panel("Lag of the event loop", "How late a timer comes; above 0.1 s streams stutter.", "s",
              percentiles("strata_loop_lag_seconds")),
        Panel("Duration of a scrape", "Grows when something holds up the event loop.", "s",
              [(f"max by (instance) ({now('scrape_duration_seconds')})", "{{instance}}")]),
    ],
}


# ---------------------------------------------------------------- Grafana's JSON


def panel_json(panel: Panel, number: int, place: Json) -> Json:
    is_number = panel.shape == "number"
    defaults: Json = {"unit": panel.unit, "min": 0}
    if panel.unit == "none" and is_number:
        defaults["decimals"] = 0
    if not is_number:
        stacking = {"group": "A", "mode": "normal" if panel.shape == "stack" else "none"}
        defaults["custom"] = {"fillOpacity": 40 if panel.shape == "stack" else 5, "stacking": stacking, "showPoints": "never"}
    return {
        "id": number,
        "type": "stat" if is_number else "timeseries",
        "title": panel.title,
        "description": panel.reads,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _number_options(panel) if is_number else {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": LEGEND},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend, "range": True}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


LEGEND = {"displayMode": "list", "placement": "bottom", "showLegend": True}


def _number_options(panel: Panel) -> Json:
    shows_name = panel.queries[0][1].startswith("{{")
    return {
        "colorMode": "none", "graphMode": "none" if shows_name else "area", "textMode": "name" if shows_name else "value",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }


def all_panels() -> Iterable[Json]:
    """Rows from top to bottom, panels from left to right in them."""
    number, top = 1, 0
    for title, panels in PANELS.items():
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "panels": [],
               "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}}
        number, top, left, line = number + 1, top + 1, 0, 0
        for panel in panels:
            width, height = panel.size
            if left + width > WIDTH or (line and height != line):
                left, top = 0, top + line
            line = height
            yield panel_json(panel, number, {"x": left, "y": top, "w": width, "h": height})
            number, left = number + 1, left + width
        top += line


def variable(name: str, label: str, query: str) -> Json:
    """Its values come from a query; All is every value that the query gives."""
    return {
        "name": name, "label": label, "type": "query", "datasource": DATASOURCE, "definition": query,
        "query": {"query": query, "refId": name}, "refresh": 2, "sort": 1, "multi": True, "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> Json:
    return {
        "uid": "strata", "title": "Strata", "tags": ["llm", "strata"], "schemaVersion": 39, "version": 1, "editable": True,
        "graphTooltip": 1, "refresh": "30s", "time": {"from": "now-1h", "to": "now"}, "timezone": "browser",
        "annotations": {"list": []}, "links": [],
        "templating": {"list": [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}},
            variable("model", "Model", 'label_values(strata_build_info{job="strata"}, model_name)'),
            variable("instance", "Server", 'label_values(strata_build_info{job="strata",model_name=~"$model"}, instance)'),
        ]},
        "panels": list(all_panels()),
    }


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]  # the same bytes on Windows
    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")
