"""llama.cpp over a mapped GGUF file, by xllamacpp's server inside this process. No warm-up, no prompt cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.disk_worker import Generate


def imports() -> None:
    import xllamacpp  # noqa: F401


def start(job: dict[str, Any]) -> Generate:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = job["gguf"]
    settings.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    settings.n_ctx = job["context"]
    settings.n_parallel = 1
    settings.n_gpu_layers = 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = job["threads"]
    settings.warmup = False
    settings.fit_params = False
    settings.cache_prompt = False
    settings.cache_ram_mib = 0
    settings.n_ctx_checkpoints = 0
    settings.use_jinja = False
    settings.verbosity = 0
    server = xllamacpp.Server(settings)

    def generate(prompt: Sequence[int], arrived: Callable[[], bool]) -> None:
        request = {"prompt": list(prompt), "max_tokens": job["tokens"], "temperature": 0, "ignore_eos": True}
        server.handle_completions({**request, "cache_prompt": False, "stream": True}, lambda piece: arrived())

    return generate
