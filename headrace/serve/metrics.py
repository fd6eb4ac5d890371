"""Prometheus metrics of one server.

Contract: every `Metrics` has a registry of its own; label values come from fixed sets (routes and
statuses), so the number of series is bounded. Engine figures are read when they are scraped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.engine.stats import EngineStats
from headrace.serve.engine_client import EngineClient
from headrace.serve.log import RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Fields of EngineStats that can fall; all others only grow.
_GAUGES = frozenset(
    {
        "waiting",
        "waiting_blocks",
        "waiting_events",
        "waiting_siblings",
        "running",
        "oldest_waiting_s",
        "free_blocks",
        "total_blocks",
    }
)


class Metrics:
    """Counters and histograms of requests, and a view of the engine's own counters."""

    def __init__(self, engine: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "headrace_requests",
            "Finished requests; 499: the client went away.",
            ("route", "status"),
            registry=self._registry,
        )
        self._running = Gauge(
            "headrace_requests_running", "Requests being answered.", registry=self._registry
        )
        self._prompt_tokens = Counter(
            "headrace_prompt_tokens", "Tokens of prompts.", registry=self._registry
        )
        self._completion_tokens = Counter(
            "headrace_completion_tokens", "Tokens of answers.", registry=self._registry
        )
        self._first_token = Histogram(
            "headrace_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._duration = Histogram(
            "headrace_request_seconds",
            "From the arrival of a request for an answer to its end.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(_EngineCollector(engine))

    def began(self) -> None:
        """A request arrived."""
        self._running.inc()

    def ended(self, record: RequestRecord) -> None:
        """A request ended."""
        self._running.dec()
        self._requests.labels(record.route, str(record.status)).inc()
        if record.prompt_tokens is not None:
            self._prompt_tokens.inc(record.prompt_tokens)
            self._completion_tokens.inc(record.completion_tokens or 0)
            self._duration.observe(record.elapsed_s)

    def first_token(self, seconds: float) -> None:
        """The first token of an answer is there."""
        self._first_token.observe(seconds)

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield GaugeMetricFamily(
            "headrace_engine_ready", "1 while the engine takes requests.", value=int(engine.ready)
        )
        yield CounterMetricFamily(
            "headrace_engine_restarts",
            "How often the engine process was started again after it was lost.",
            value=engine.restarts,
        )
        stats = engine.stats()
        if stats is None:
            return
        for field in fields(stats):
            family = GaugeMetricFamily if field.name in _GAUGES else CounterMetricFamily
            name, text = f"headrace_engine_{field.name}", f"EngineStats.{field.name} of the engine."
            value = getattr(stats, field.name)
            if not isinstance(value, tuple):
                yield family(name, text, value=value)
                continue
            by_place = family(name, text + " By place in the block.", labels=("place",))
            for place, count in enumerate(value, start=1):
                by_place.add_metric((str(place),), count)
            yield by_place
        if stats.verified_drafts:
            yield from _length_histograms(stats)


def _length_histograms(stats: EngineStats) -> Iterator[HistogramMetricFamily]:
    """How many drafts a decode round verified, and how many tokens it brought."""
    for name, text, by_place, more in (
        ("verified_length", "Drafts that a decode round verified.", stats.verified_drafts, 0),
        (
            "accepted_length",
            "Tokens that a decode round brought: the accepted drafts and one more.",
            stats.accepted_drafts,
            1,
        ),
    ):
        rounds = stats.draft_rounds
        # A place counts the rounds that got further than it.
        below = [(str(n + more), rounds - count) for n, count in enumerate(by_place)]
        yield HistogramMetricFamily(
            f"headrace_engine_{name}",
            text,
            buckets=[*below, (str(len(by_place) + more), rounds), ("+Inf", rounds)],
            sum_value=sum(by_place) + more * rounds,
        )
