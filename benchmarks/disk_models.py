"""The models that are read from disk, and each in the file that a way of reading wants."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks import disk_gguf, models


def dense(layers: int, *, hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )


def sparse(
    layers: int, *, hidden: int, experts: int, intermediate: int, top_k: int, heads: int, kv_heads: int, vocabulary: int
) -> Qwen3MoeConfig:
    """Its checkpoint has three tensors for each expert."""
    return Qwen3MoeConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        moe_intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True)
class Files:
    """One model's weights, three times: bytes, layers and values are the same.

    `folder`: the checkpoint. `fused`: the same with the experts of a layer stacked, as transformers computes with them
    (the checkpoint itself for a dense model). `gguf`: for llama.cpp. `nbytes`: of the weights, in the checkpoint's
    dtype; `step_bytes`: of those that every token reads; `expert_bytes`: of all experts; `chosen`: the share of the
    experts that one token reads.
    """

    folder: Path
    fused: Path
    gguf: Path
    nbytes: int
    step_bytes: int
    expert_bytes: int
    chosen: float

    def floor_bytes(self, held_bytes: float) -> float:
        """The least that one token must read from disk where memory holds `held_bytes` of weights.

        What every token reads is held first, then as large a share of the experts as there is room for, each as likely
        to be chosen as any other. The embedding counts as nothing: a token reads one row.
        """
        missing = max(0.0, self.step_bytes - held_bytes)
        if not self.expert_bytes:
            return missing
        room = max(0.0, held_bytes - self.step_bytes)
        return missing + self.chosen * max(0.0, self.expert_bytes - room)


def made(config: PretrainedConfig, cache: Path) -> Files:
    """The files below `cache`, made where they are missing."""
    folder = models.checkpoint(config, torch.bfloat16, cache)
    fused, path = folder, folder.with_suffix(".gguf")
    if config.model_type == "qwen3_moe":
        fused = folder.with_name(f"{folder.name}-fused")
        if not fused.exists():
            _fuse(folder, fused)
    if not path.exists():
        disk_gguf.write(folder, path)
    total = every = experts = 0
    for name, nbytes in _sizes(folder).items():
        total += nbytes
        if ".experts." in name:
            experts += nbytes
        elif name != "model.embed_tokens.weight":
            every += nbytes
    chosen = config.num_experts_per_tok / config.num_experts if experts else 1.0
    return Files(folder, fused, path, total, every, experts, chosen)


def _sizes(folder: Path) -> dict[str, int]:
    sizes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (no mapping)
                sizes[name] = 2 * int(torch.Size(opened.get_slice(name).get_shape()).numel())
    return sizes


def _fuse(folder: Path, fused: Path) -> None:
    """`folder` with each layer's experts as two stacks, a file for each layer."""
    half = fused.with_suffix(".part")
    half.mkdir(exist_ok=True)
    names = _sizes(folder)
    (file,) = folder.glob("*.safetensors")
    where = {}
    with safe_open(file, "pt") as opened:
        for prefix in dict.fromkeys(name.split(".experts.")[0] for name in names if ".experts." in name):
            sides = {
                side: torch.stack(
                    [
                        opened.get_tensor(f"{prefix}.experts.{number}.{side}_proj.weight")
                        for number in range(sum(name.startswith(f"{prefix}.experts.") for name in names) // 3)
                    ]
                )
                for side in ("gate", "up", "down")
            }
            stacked = {
                f"{prefix}.experts.gate_up_proj": torch.cat((sides["gate"], sides["up"]), 1),
                f"{prefix}.experts.down_proj": sides["down"],
            }
            save_file(stacked, half / f"{prefix}.safetensors", metadata={"format": "pt"})
            where |= dict.fromkeys(stacked, f"{prefix}.safetensors")
        rest = {name: opened.get_tensor(name) for name in names if ".experts." not in name}
        save_file(rest, half / "rest.safetensors", metadata={"format": "pt"})
        where |= dict.fromkeys(rest, "rest.safetensors")
    (half / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (half / "config.json").write_text((folder / "config.json").read_text())
    half.rename(fused)
