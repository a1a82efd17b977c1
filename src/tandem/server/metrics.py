"""The metrics for Prometheus at /metrics."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.core.config import helps
from tandem.server.engine_client import EngineClient

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
_SECONDS_PER_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Metrics:
    """Counters of the HTTP side, and the state of the engine process."""

    def __init__(self, engine: EngineClient) -> None:
        """Create the counters; the engine's state is read on each request for metrics."""
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "tandem_requests", "requests that have ended", ["endpoint", "status"],
            registry=self._registry,
        )  # fmt: skip
        self.first_token = self._histogram(
            "time_to_first_token", "from a request to its first token"
        )
        self.per_token = self._histogram(
            "time_per_output_token", "mean time of a request's tokens but the first",
            _SECONDS_PER_TOKEN,
        )  # fmt: skip
        self.duration = self._histogram("request", "from a request to its end")
        self.gap = self._histogram(
            "token_gap", "from one token of an answer to the next", _SECONDS_PER_TOKEN
        )
        waiting = self._histogram("waiting", "from a request to its sequence slot")
        engine.on_begin = waiting.observe
        self._registry.register(_EngineCollector(engine))

    def _histogram(
        self, name: str, help_line: str, buckets: Sequence[float] = _SECONDS
    ) -> Histogram:
        full = f"tandem_{name}_seconds"
        return Histogram(full, help_line, buckets=buckets, registry=self._registry)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector:
    """Reports the engine process's counters when Prometheus reads the metrics."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, statistics = self._engine, self._engine.statistics
        for sums in (statistics.batch, statistics):
            values = asdict(sums)
            for name, help_line in helps(type(sums)).items():
                yield CounterMetricFamily(f"tandem_{name}", help_line, value=values[name])
        yield CounterMetricFamily(
            "tandem_engine_restarts", "restarts of the engine process", value=engine.num_restarts
        )
        gauges = {
            "requests_running": ("requests that are being answered", engine.num_running),
            "requests_waiting": ("requests that wait for a sequence slot", engine.num_waiting),
            "ready": ("whether the model answers", int(engine.is_ready)),
            "kv_disk_bytes": ("bytes of beginnings of prompts on disk", statistics.disk_bytes),
            "expert_slots": ("slots of the expert cache", statistics.slots),
            "expert_hit_rate": ("hits over active experts, since the start",
                                _ratio(statistics.hits, statistics.active_experts)),
            "prefetch_accuracy": ("useful prefetches over all, since the start",
                                  _ratio(statistics.prefetch_useful, statistics.prefetch_issued)),
            "decode_tokens_per_second": ("generated tokens over the time of decode steps",
                                         _ratio(statistics.batch.generated_tokens,
                                                statistics.batch.decode_seconds)),
            "draft_saved_bytes": ("bytes of expert weights that drafted tokens saved",
                                  statistics.draft_saved_bytes),
            "device_share_of_rows": ("share of routed tokens that the device computed",
                                     _ratio(statistics.rows_on_device, statistics.rows_on_device
                                            + statistics.rows_on_cpu)),
        }  # fmt: skip
        for name, (help_line, value) in gauges.items():
            yield GaugeMetricFamily(f"tandem_{name}", help_line, value=value)
        memory = GaugeMetricFamily(
            "tandem_memory_bytes", "memory of the engine process", labels=["kind"]
        )
        for kind, num_bytes in statistics.memory_bytes.items():
            memory.add_metric([kind], num_bytes)
        yield memory


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
