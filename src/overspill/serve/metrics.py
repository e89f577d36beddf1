"""Counters for Prometheus: vLLM's names where the meaning is the same, ours for bytes, the link and experts."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from overspill.engine.engine import Engine
from overspill.engine.requests import FinishReason, Output, Request
from overspill.engine.service import EngineService, ExpertStats
from overspill.offload.expert_slots import SlotCounts

_PURPOSES = ("weights", "buffer_pool", "kv_cache", "working")
_MEMORY_EVERY_S = 1.0
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_TOKENS = tuple(2.0**power for power in range(15))


class Metrics:
    """Of one served model. Histograms are fed by the engine's thread; the rest is read from it when asked for."""

    def __init__(self, engine: Engine, service: EngineService, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._engine = engine
        self._label = {"model_name": model_name}
        self._last_output: dict[Request, float] = {}
        self._purposes = (*_PURPOSES, *(["expert_slots"] if engine.plan.slots is not None else []))
        self._read_memory()

        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            made = Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        self._first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self._inter_token = histogram("vllm:inter_token_latency_seconds", "From one step of an answer to the next.")
        self._end_to_end = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end of the answer.")
        self._queued = histogram("vllm:request_queue_time_seconds", "From arrival to the first computation.")
        self._step_tokens = histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", _TOKENS)
        self._step = histogram("overspill_step_seconds", "Of one pass over the model.")
        self.registry.register(_Snapshot(engine, service, self._label, self))
        ProcessCollector(registry=self.registry)
        service.add_step_listener(self.on_step)

    def on_output(self, request: Request, output: Output) -> None:
        """Called in the engine's thread."""
        now = time.monotonic()
        before = self._last_output.get(request)
        if output.token_ids and before is None:
            self._first_token.observe(now - request.times["arrived"])
        elif output.token_ids and before is not None:
            self._inter_token.observe(now - before)
        if output.finish_reason is None:
            self._last_output[request] = now
        else:
            self._last_output.pop(request, None)

    def on_step(self, seconds: float, tokens: int, finished: Iterable[Request]) -> None:
        """Called in the engine's thread."""
        self._step.observe(seconds)
        self._step_tokens.observe(tokens)
        for request in finished:
            times = request.times
            if "started" in times:
                self._queued.observe(times["started"] - times["arrived"])
            self._end_to_end.observe(times["finished"] - times["arrived"])
        if time.monotonic() - self._memory_read > _MEMORY_EVERY_S:
            self._read_memory()

    def _read_memory(self) -> None:
        """In the thread that the device works in: its account is not to be walked from beside."""
        device = self._engine.placed.device
        self.memory = {purpose: device.held_bytes(purpose) for purpose in self._purposes}
        self._memory_read = time.monotonic()


class _Snapshot(Collector):
    """What the engine counts itself, read when Prometheus asks."""

    def __init__(self, engine: Engine, service: EngineService, label: dict[str, str], metrics: Metrics) -> None:
        self._service = service
        self._label = label
        self._metrics = metrics
        self._tiers = Tally[tuple[str, str]]()
        for entry in engine.ledger.entries:
            self._tiers[entry.tier.value, entry.access.value] += entry.bytes

    def collect(self) -> Iterator[Metric]:
        stats = self._service.stats()
        yield self._gauge("vllm:num_requests_running", "Requests being computed.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a place.", stats.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all.", stats.kv_usage)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield self._counter(
            "vllm:num_preemptions", "Requests that gave their memory up for a while.", stats.preemptions
        )
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=[*self._label, "finished_reason"]
        )
        for reason in FinishReason:
            success.add_metric([*self._label.values(), reason.value], stats.finished[reason.value])
        yield success
        tiers = GaugeMetricFamily("overspill_tier_bytes", "Weights by tier and access.", labels=["tier", "access"])
        for labels, nbytes in self._tiers.items():
            tiers.add_metric(labels, nbytes)
        yield tiers
        memory = GaugeMetricFamily("overspill_memory_bytes", "Device memory held, by purpose.", labels=["purpose"])
        for purpose, nbytes in self._metrics.memory.items():
            memory.add_metric([purpose], nbytes)
        yield memory
        yield CounterMetricFamily("overspill_steps", "Passes over the model.", stats.steps)
        yield CounterMetricFamily("overspill_link_bytes", "Bytes carried by the link.", stats.traffic.bytes)
        yield CounterMetricFamily("overspill_link_stall_seconds", "Waited for the link.", stats.traffic.stall_s)
        if stats.step_link_floor_s is not None:
            yield GaugeMetricFamily(
                "overspill_step_link_floor_seconds",
                "The least that a step takes for the link's sake, as the plan says.",
                stats.step_link_floor_s,
            )
        if stats.experts is not None:
            yield from _experts(stats.experts)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._label))
        family.add_metric(list(self._label.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._label))
        family.add_metric(list(self._label.values()), value)
        return family


def _experts(experts: ExpertStats) -> Iterator[Metric]:
    if experts.counts is not None:
        slots = GaugeMetricFamily("overspill_expert_slots", "Slots for streamed experts, by state.", labels=["state"])
        slots.add_metric(["held"], experts.slots - experts.slots_free)
        slots.add_metric(["free"], experts.slots_free)
        yield slots
        yield from _streamed(experts.counts)
    if experts.placed:
        for name, text in (
            ("calls", "Passes over a layer's experts on the CPU."),
            ("tokens", "Tokens in the passes over a layer's experts on the CPU."),
            ("bytes", "Bytes of a layer's experts that the CPU read."),
        ):
            family = CounterMetricFamily(f"overspill_placed_expert_{name}", text, labels=["layer"])
            for layer, use in experts.placed.items():
                family.add_metric([str(layer)], getattr(use, name))
            yield family


def _streamed(counts: SlotCounts) -> Iterator[Metric]:
    lookups = CounterMetricFamily(
        "overspill_expert_lookups",
        "Experts that passes chose: found in a slot (hit), fetched into one, streamed past, or computed on the CPU.",
        labels=["result"],
    )
    for result, number in (
        ("hit", counts.hits),
        ("fetched", counts.fetched),
        ("streamed", counts.streamed),
        ("computed", counts.computed),
    ):
        lookups.add_metric([result], number)
    yield lookups
    prefetches = CounterMetricFamily(
        "overspill_expert_prefetches", "Experts fetched ahead, by what became of them.", labels=["result"]
    )
    prefetches.add_metric(["used"], counts.prefetch_used)
    prefetches.add_metric(["wasted"], counts.prefetch_wasted)
    yield prefetches
    for name, text, value in (
        ("prefetches_issued", "Experts fetched ahead: used, wasted, or not asked for yet.", counts.prefetched),
        ("promotions", "Experts fetched into a slot after the CPU had computed them.", counts.promoted),
        ("loads", "Experts brought into a slot before the first pass.", counts.loaded),
        ("evictions", "Experts that left a slot.", counts.evictions),
        ("bytes", "Bytes of experts brought to the device.", counts.bytes),
        ("stall_seconds", "Waited for experts that were on their way.", counts.stall_s),
    ):
        yield CounterMetricFamily(f"overspill_expert_{name}", text, value)
