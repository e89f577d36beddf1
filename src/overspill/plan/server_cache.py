"""How much memory a server's KV cache gets: what its requests can need, or what the device has left for it."""

from __future__ import annotations

from dataclasses import replace

from overspill.config.settings import EngineSettings
from overspill.config.sizes import format_bytes
from overspill.errors import ConfigError
from overspill.model.trace import Trace
from overspill.plan.placement import MemoryForecast

_ROUNDING_TOKENS = 48  # a page begun, a page on the far side of a window, and the page of zeros (engine/pages.py)


def server_memory(memory: MemoryForecast, traced: Trace, engine: EngineSettings) -> MemoryForecast:
    """The forecast of a server: requests share the cache, and a pass computes `max_num_batched_tokens` at the most.

    The cache is for `max_num_seqs` whole contexts where the device has room for them, else for as much as there is
    room, and for one context at least. ConfigError where a stated size does not hold one.
    """
    chunk = engine.max_num_batched_tokens
    if chunk is None:
        return memory
    working_bytes = traced.working_bytes * min(chunk, traced.tokens) // traced.tokens
    least = _one_context_bytes(traced, chunk)
    if (stated := engine.kv_cache_memory_bytes) is not None:
        if stated < least:
            raise ConfigError(
                f"kv_cache_memory_bytes is {stated} ({format_bytes(stated)}), and one request of {traced.tokens} "
                f"tokens takes {format_bytes(least)}",
                hint=f"at least {least}, or a smaller max_model_len",
            )
        cache_bytes = stated
    else:
        taken_bytes = memory.lasting_bytes + working_bytes
        room_bytes = memory.available_device_bytes - taken_bytes
        cache_bytes = max(least, min(room_bytes, least * engine.max_num_seqs))
    return replace(memory, kv_cache_bytes=cache_bytes, working_bytes=working_bytes)


def server_cache_tokens(memory: MemoryForecast, traced: Trace, engine: EngineSettings) -> int | None:
    """About the tokens that the cache holds; None for what is no server, and where the model could not be traced."""
    if engine.max_num_batched_tokens is None or traced.failure is not None or not traced.kv_cache_bytes:
        return None
    one = _one_context_bytes(traced, engine.max_num_batched_tokens)
    return traced.tokens * (memory.kv_cache_bytes or 0) // one


def _one_context_bytes(traced: Trace, chunk: int) -> int:
    """A request of the whole context in pages; layers with a window also hold what a pass computes before it slides."""
    windowed = traced.kv_cache_bytes < traced.kv_token_bytes * traced.tokens
    extra_tokens = _ROUNDING_TOKENS + (chunk if windowed else 0)
    return traced.kv_cache_bytes + extra_tokens * traced.kv_token_bytes
