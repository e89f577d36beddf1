"""A row of the support matrix: what of overspill an architecture runs with, found by running it.

A way of offloading either gives the bits of a model that is not offloaded, with every weight where the plan says, or it
is refused by an error of ours, whose words are the row's. Anything else is no row but an AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import overspill
from architectures import Tiny, tiny
from emulated_runs import CONTEXT, PROMPT, emulated, gib, mapped, settings_for
from overspill.errors import ConfigError, UnsupportedModelError
from overspill.model.hf import cache_argument, cache_of
from overspill.model.sources import Extents
from overspill.model.weights import ModelMap, Role
from overspill.offload.placed import PlacedModel, place
from overspill.plan import Access, Plan, Tier, make_plan
from overspill.support import Row

DECODED = (11, 77)
NMSE_BOUND = 5e-4

PREFETCH = {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 1}}
SLOTS = {"overspill": {"expert_stream": {"slots": 3}}}
ON_CPU = {"overspill": {"placement": {"cpu_moe": True}}}

CHOOSES_ITSELF = ("dbrx", "deepseek_v4", "longcat_flash")
"""What a step reads of these hangs on values: experts of their own, keys that are compressed every few tokens."""


def row_of(kind: str, folder: Path) -> Row:
    """The row of the architecture `kind`; its checkpoint is written into `folder`."""
    model = tiny(kind)
    return _refused(model, folder) if model.unbuildable else Trial(model, folder).row()


def _refused(model: Tiny, folder: Path) -> Row:
    """The refusal; the checkpoint holds one tensor of no meaning, since no weight is to be read."""
    model.config.save_pretrained(folder)
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    try:
        overspill.plan(folder, device="emulated", device_memory_bytes=1 << 20)
    except UnsupportedModelError as error:
        return Row(model.architecture, model.model_type, "refused", reason=" ".join(error.message.split()))
    raise AssertionError(f"{model.kind} was to be refused, and was planned")


class Trial:
    """One architecture in all ways."""

    def __init__(self, model: Tiny, folder: Path) -> None:
        self.tiny = model
        self.folder = folder
        self.live: Any = model.model()
        self.live.save_pretrained(folder)
        self.map = mapped(folder)
        self.step_bytes: int | None = None
        """What the last pass carried over the link, if it was one over a single token."""
        self.expected = self.of_transformers()
        assert all(logits.isfinite().all() and logits.std() > 0.01 for logits in self.expected)

    def row(self) -> Row:
        resident = self.carried_out(self.map, None)
        assert same(self.logits(resident), self.expected), "nothing offloaded, and not what transformers gives"
        ways: Mapping[str, Callable[[], None]] = {
            "uva": self.uva,
            "prefetch": self.prefetch,
            "disk": self.disk,
            "placement": self.placement,
            "expert_stream": self.expert_stream,
        }
        has_experts = any(weight.role is Role.ROUTED_EXPERT for weight in self.map)
        backends, limits = [], {}
        for name, way in ways.items():
            if name in ("placement", "expert_stream") and not has_experts:
                continue
            try:
                way()
                backends.append(name)
            except (ConfigError, UnsupportedModelError) as refused:
                limits[name] = " ".join(refused.message.split()).removeprefix(f"{name}: ")
        architecture, model_type = self.tiny.architecture, self.tiny.model_type
        return Row(architecture, model_type, "supported", tuple(backends), None, limits, tuple(self.features()))

    # -- ways ----------------------------------------------------------------------------------------------------------

    def uva(self) -> None:
        """Half of the weights, those that cost least; and all, from a checkpoint that holds experts as one tensor."""
        self.same_bits({"uva": {"cpu_offload_gb": gib(self.map.nbytes / 2)}})
        whole = self.map
        if any(not isinstance(w.source, Extents) or len(w.source.extents) > 1 for w in self.map):
            tensors = {name: tensor.contiguous() for name, tensor in self.live.state_dict().items()}
            for file in self.folder.glob("model*.safetensors*"):
                file.unlink()
            aliases = {alias for weight in self.map for alias in weight.aliases}
            fused = {name: tensor for name, tensor in tensors.items() if name not in aliases}
            save_file(fused, self.folder / "model.safetensors", metadata={"format": "pt"})
            whole = mapped(self.folder)
            self.map = whole
        model = self.same_bits({"uva": {"cpu_offload_gb": 1}}, whole)
        on_host = {p.weight.full for p in model.plan.on(Tier.HOST)}
        assert on_host == {w.full for w in self.map if w.role is not Role.BUFFER and w.nbytes}, "embeddings, head, all"

    def prefetch(self) -> None:
        model = self.same_bits(PREFETCH)
        assert model.prefetcher is not None
        assert model.prefetcher.out_of_turn == 0

    def disk(self) -> None:
        """Layers that host memory has no room for are read from the checkpoint in each pass."""
        host_bytes = self.planned(self.map, PREFETCH).memory.host_bytes
        model = self.same_bits(PREFETCH, memory_limit_bytes=host_bytes - (1 << 12))
        assert model.plan.on(Tier.DISK)
        assert model.prefetcher is not None
        assert model.prefetcher.source.reads is not None
        assert model.prefetcher.source.reads.bytes_read > 0

    def placement(self) -> None:
        model = self.carried_out(self.map, ON_CPU)
        assert all(p.access is Access.IN_PLACE for p in model.plan.placements if p.weight.role is Role.ROUTED_EXPERT)
        for expected, found in zip(self.expected, self.logits(model), strict=True):
            error = (found - expected).double().square().sum() / expected.double().square().sum()
            assert error < NMSE_BOUND, f"experts on the CPU: NMSE {error:.1e}"
        model.experts.prove_used()

    def expert_stream(self) -> None:
        model = self.same_bits(SLOTS)
        stream = model.experts.stream
        assert stream is not None
        assert stream.counts.bytes > 0

    # -- runs ----------------------------------------------------------------------------------------------------------

    def same_bits(self, document: Any, model_map: ModelMap | None = None, **engine: Any) -> PlacedModel:
        """Carried out, with the bits of no offload, twice: by then buffers hold what they did not at first."""
        model = self.carried_out(model_map or self.map, document, **engine)
        device = model.device
        begun = device.traffic.copy()
        for _ in range(2):
            assert same(self.logits(model), self.expected), f"other bits with {document}"
        moved_bytes, passes = (device.traffic - begun).bytes, 2 * len(self.expected)
        if self.reads_something(model.plan):
            assert moved_bytes > 0
        ring, slots = model.plan.ring, model.plan.slots
        if ring is not None:  # what is ahead when a pass ends was ordered by it
            assert abs(moved_bytes - passes * ring.pass_bytes) <= 2 * ring.pool_bytes
        elif slots is None and self.tiny.kind not in CHOOSES_ITSELF and self.step_bytes is not None:
            assert self.step_bytes == round(model.plan.step.link_bytes), "bytes over the link in a decode step"
        return model

    def reads_something(self, plan: Plan) -> bool:
        """Whether text alone reads anything of what was moved: the towers are moved first, and it does not."""
        return self.tiny.inputs is not None or any(p.weight.step_bytes(1) for p in plan.on(Tier.HOST))

    def planned(self, model_map: ModelMap, document: Any, **engine: Any) -> Plan:
        fresh = replace(model_map, skeleton=deepcopy(model_map.skeleton))  # which placing fills
        return make_plan(fresh, settings_for(document, **engine), emulated(), context_tokens=CONTEXT)

    def carried_out(self, model_map: ModelMap, document: Any, **engine: Any) -> PlacedModel:
        """Loaded and proved by the ledger, with released buffers poisoned and every access checked by its address."""
        model = place(self.planned(model_map, document, **engine), emulated(), debug=True)
        unplaced = [n for n, t in model.model.state_dict(keep_vars=True).items() if t.device.type == "meta"]
        assert not unplaced, f"on meta still: {unplaced}"
        return model

    def of_transformers(self) -> list[torch.Tensor]:
        """What transformers itself gives, each expert's product by itself as ours."""
        if hasattr(self.live, "set_experts_implementation"):
            self.live.set_experts_implementation("eager")
        with torch.no_grad():
            return self.passes(self.live, lambda tensor: tensor)

    def logits(self, model: PlacedModel) -> list[torch.Tensor]:
        with model.running():
            return self.passes(model.model, model.device.to_device, model)

    def passes(self, model: Any, given: Any, placed: PlacedModel | None = None) -> list[torch.Tensor]:
        """Logits of one pass over a prompt, and of decoding over its cache."""
        if self.tiny.inputs is not None:
            return self.answer(model, {name: given(tensor) for name, tensor in self.tiny.inputs.items()})
        self.step_bytes = None
        cache, ids = None, list(PROMPT)
        results = []
        for number in range(1 + len(DECODED)):
            begun = placed.device.traffic.copy() if placed is not None else None
            tokens = given(torch.tensor([ids] * self.tiny.rows))
            kept = {} if cache is None else {cache_argument(model): cache}
            output = model(tokens, use_cache=self.tiny.cached, **kept)
            if placed is not None and begun is not None and tokens.numel() == 1:
                self.step_bytes = (placed.device.traffic - begun).bytes
            results.append(output.logits.clone())
            cache = cache_of(output) if self.tiny.cached else None
            if number < len(DECODED):
                ids = [DECODED[number]] if cache is not None else [*ids, DECODED[number]]
        return results

    def answer(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The same through `generate`, which prepares pictures and sound for each step."""
        whole = model(**inputs).logits.clone()
        generated = model.generate(
            **inputs,
            max_new_tokens=len(DECODED),
            min_new_tokens=len(DECODED),
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return [whole, *(logits.clone() for logits in generated.logits)]

    # -- what the tiny model has ---------------------------------------------------------------------------------------

    def features(self) -> list[str]:
        """What is special about it, as far as its configuration and its weights tell."""
        config = self.map.config.get_text_config(decoder=True)
        names = [weight.full for weight in self.map]
        classes = {type(module).__name__.lower() for module in self.live.modules()}
        heads, groups = (getattr(config, n, None) for n in ("num_attention_heads", "num_key_value_heads"))
        window = getattr(config, "sliding_window", None)
        types = set(getattr(config, "layer_types", None) or ())
        recurrent = ("mamba", "deltanet", "rglru", "rwkv", "lstm", "linearattention", "shortconv", "lightning")
        found = {
            "tied embeddings": any(weight.aliases for weight in self.map),
            "biases": any(name.endswith(".bias") and "norm" not in name and "ln_" not in name for name in names),
            "grouped heads": isinstance(groups, int) and isinstance(heads, int) and groups < heads,
            "latent attention": getattr(config, "kv_lora_rank", None) is not None,
            "sliding window": "sliding_attention" in types or (not types and bool(window)),
            "linear attention or state space": "linear_attention" in types
            or any(word in name for name in classes for word in recurrent),
            "embeddings by layer": any("per_layer" in name for name in names),
            "routed experts": any(weight.role is Role.ROUTED_EXPERT for weight in self.map),
            "shared experts": any(weight.role is Role.SHARED_EXPERT for weight in self.map),
            "towers": any(stack.tower for stack in self.map.stacks),
            "layers run in rounds": self.map.rounds > 1,
            "a picture": self.tiny.inputs is not None and "pixel_values" in self.tiny.inputs,
            "sound": self.tiny.inputs is not None and "input_features" in self.tiny.inputs,
        }  # fmt: skip
        return [name for name, there in found.items() if there]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
