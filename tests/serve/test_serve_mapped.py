"""A server whose weights lie in a mapped file that shrinks: it answers with an error and stays."""

from __future__ import annotations

import json
import os
from pathlib import Path

from serving import eventually, started

from changed_files import restored
from tiny_models import TINY

ASKED = {"prompt": [5, 17, 99], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
MMAP = ("--device", "cpu", "--offload-config", json.dumps({"vllm_cpp": {"mmap": {"enabled": True}}}))


def test_a_file_that_shrinks_fails_its_requests_and_not_the_server(tmp_path: Path) -> None:
    TINY["llama_bf16"].save(tmp_path)
    file = tmp_path / "model.safetensors"
    restore = restored(file)
    with started(tmp_path, *MMAP, "--max-num-seqs", 2, "--max-model-len", 64) as server, server.http() as http:
        before = http.post("/v1/completions", json=ASKED).raise_for_status().json()["choices"][0]["logprobs"]
        assert any("are used in place in the mapped files" in line for line in server.lines)
        os.truncate(file, 0)
        refused = http.post("/v1/completions", json=ASKED)
        assert refused.status_code == 500, refused.text
        assert refused.json()["error"]["type"] == "server_error"
        assert str(tmp_path) not in refused.text
        assert eventually(lambda: any("model.safetensors changed since its header was read" in x for x in server.lines))
        restore()
        after = http.post("/v1/completions", json=ASKED).raise_for_status().json()["choices"][0]["logprobs"]
        assert after == before
        assert server.stop() == 0
