"""The metrics of a server for Prometheus, under vLLM's names if they mean the same, so that its dashboards work."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from refusion_jax.serving.engine import Engine

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_PER_FORWARD = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)


class Metrics(Collector):
    """The metrics of one engine, from the start of the server."""

    def __init__(self, model: str, engine: Engine):
        self.registry = CollectorRegistry()
        self._model, self._engine = model, engine

        def make(kind: type, name: str, text: str, **how):
            return kind(name, text, ["model_name"], registry=self.registry, **how).labels(model)

        running = make(Gauge, "vllm:num_requests_running", "Answers that are being decoded")
        running.set_function(lambda: engine.load["decoding"])
        waiting = make(Gauge, "vllm:num_requests_waiting", "Answers that wait for a row")
        waiting.set_function(lambda: engine.load["waiting"])
        self.given = make(Counter, "vllm:prefix_cache_queries", "Tokens of prompts of decoded answers")
        self.cached = make(Counter, "vllm:prefix_cache_hits", "Those whose keys and values were there already")
        labels = ["model_name", "finished_reason"]
        self._success = Counter("vllm:request_success", "Finished answers", labels, registry=self.registry)
        self.prompt = make(Counter, "vllm:prompt_tokens", "Tokens of prompts")
        self._generated = make(Counter, "vllm:generation_tokens", "Tokens of answers")
        first, whole = "Until the first tokens of a streamed answer", "Until an answer was complete"
        self.first = make(Histogram, "vllm:time_to_first_token_seconds", first, buckets=_SECONDS)
        self._whole = make(Histogram, "vllm:e2e_request_latency_seconds", whole, buckets=_SECONDS)
        between = "Between two tokens of a streamed answer; those that come together share the time since the last ones"
        self._between = make(Histogram, "vllm:inter_token_latency_seconds", between, buckets=_BETWEEN)
        per_forward = "Tokens per forward of each answer"
        self._per_forward = make(Histogram, "refusion_jax:tokens_per_forward", per_forward, buckets=_PER_FORWARD)
        self.registry.register(self)

    def went_on(self, tokens: int, seconds: float) -> None:
        """Records the time that further tokens of a stream took in total."""
        for _ in range(tokens):
            self._between.observe(seconds / tokens)

    def finished(self, reason: str, tokens: int, forwards: int, seconds: float) -> None:
        """Counts an answer, ended by "stop" or "length"; forwards of the decoding loop, 0 if nothing was decoded."""
        self._success.labels(model_name=self._model, finished_reason=reason).inc()
        self._generated.inc(tokens)
        self._whole.observe(seconds)
        if forwards:
            self._per_forward.observe(tokens / forwards)

    def collect(self) -> Iterator[CounterMetricFamily]:
        texts = {"draft": "Tokens that forward passes have verified", "accepted": "Those of them that were committed"}
        for (name, text), count in zip(texts.items(), self._engine.verified, strict=True):
            family = CounterMetricFamily(f"vllm:spec_decode_num_{name}_tokens", text, labels=["model_name"])
            family.add_metric([self._model], count)
            yield family
