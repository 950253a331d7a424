"""What Prometheus reads: counters, gauges and histograms of one server."""

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

Outcome = Literal["ok", "rejected", "failed", "cancelled", "timed_out"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "rejected", "failed", "cancelled", "timed_out")
FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
GAP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, rows: int, queue: Callable[[], int], running: Callable[[], int]) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("mtbench_requests", "Requests by outcome.", ["outcome"], registry=registry)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        Gauge("mtbench_queue_length", "Requests that wait for a row.", registry=registry).set_function(queue)
        Gauge("mtbench_rows_running", "Rows that decode a request.", registry=registry).set_function(running)
        Gauge("mtbench_rows", "Rows of the batch.", registry=registry).set(rows)
        self.tokens = Counter("mtbench_tokens", "Tokens decoded.", registry=registry)
        self.forwards = Counter("mtbench_forwards", "Forward passes, counted once per running row.", registry=registry)
        self.first_s = Histogram(
            "mtbench_time_to_first_token_seconds", "Arrival to first token.", buckets=FIRST_S, registry=registry
        )
        self.gap_s = Histogram(
            "mtbench_inter_token_latency_seconds",
            "Time per token after the first; n tokens of one forward are n gaps.",
            buckets=GAP_S,
            registry=registry,
        )

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self.registry)
