"""The server's counters, in the text format of Prometheus.

    GET /metrics

Counters grow from the start of the server. Gauges are the values of this moment.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from jzero.serving.worker import DecodingWorker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric(NamedTuple):
    """A metric with its values, by their label."""

    name: str
    kind: str  # "counter" or "gauge"
    help: str
    values: Mapping[str, float]  # {'state="used"': 3}; "" without a label


def metrics_of(worker: DecodingWorker, requests: Counter[str], refused: int) -> list[Metric]:
    """Returns the metrics of a server.

    Args:
        requests: number of requests by endpoint.
        refused: number of requests that were answered with an error.
    """
    counters = worker.counters
    running = len(worker.live)
    by_endpoint = {f'endpoint="{name}"': count for name, count in sorted(requests.items())}
    tokens = {
        "prompt_tokens": ("of prompts that were prefilled", counters.prefill_tokens),
        "cached_tokens": ("of prompts, from the prefix cache", counters.cached_tokens),
        "generation_tokens": ("that were sampled", counters.decoded_tokens),
        "scored_tokens": ("of given texts that were scored", counters.scored_tokens),
    }
    allocators = worker.engine.page_allocators
    free = sum(len(allocator.free_pages) for allocator in allocators)
    # One page of each allocator is for scratch.
    total = sum(len(allocator.reference_counts) - 1 for allocator in allocators)
    return [
        Metric("requests_total", "counter", "Requests by endpoint.", by_endpoint),
        Metric("refused_requests_total", "counter", "Requests with an error.", {"": refused}),
        *(
            Metric(f"{name}_total", "counter", f"Tokens {origin}.", {"": count})
            for name, (origin, count) in tokens.items()
        ),
        Metric(
            "preemptions_total",
            "counter",
            "Sequences that lost their slot.",
            {"": counters.preempted},
        ),
        Metric("sequences_running", "gauge", "Sequences in slots.", {"": running}),
        Metric(
            "sequences_waiting",
            "gauge",
            "Admitted sequences that are in no slot yet, or wait for their scores.",
            {"": max(0, worker.num_reserved - running)},
        ),
        Metric("slots", "gauge", "Sequences that are decoded at once.", {"": worker.num_slots}),
        Metric(
            "kv_pages",
            "gauge",
            "Pages of the KV cache.",
            {'state="used"': total - free, 'state="free"': free},
        ),
    ]


def write(metrics: list[Metric]) -> str:
    """Returns metrics in the text format of Prometheus."""
    lines = []
    for metric in metrics:
        name = f"jzero_{metric.name}"
        lines.append(f"# HELP {name} {metric.help}")
        lines.append(f"# TYPE {name} {metric.kind}")
        for label, value in metric.values.items():
            labels = f"{{{label}}}" if label else ""
            lines.append(f"{name}{labels} {value}")
    return "\n".join(lines) + "\n"
