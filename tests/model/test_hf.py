"""The contacts with transformers' less public functions: what they are used for holds in every version we run on."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3nConfig, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.modeling_layers import GradientCheckpointingLayer

from overspill.checkpoint import open_checkpoint
from overspill.errors import UnsupportedModelError
from overspill.model import hf
from overspill.model.hf_names import _blocks, _targets, map_checkpoint_names
from tiny_models import ARCHITECTURES, TINY, MakeTiny


def skeleton_of(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return hf.build_skeleton(TINY[name].config(), dtype)


def from_pretrained(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model


# -- signatures --------------------------------------------------------------------------------------------------------


def test_the_private_functions_still_take_what_they_are_given() -> None:
    inspect.signature(get_model_conversion_mapping).bind(object())
    inspect.signature(rename_source_key).bind("name", [], [], "model", {})
    inspect.signature(PreTrainedModel._initialize_missing_keys).bind(object(), is_quantized=False)
    inspect.signature(PreTrainedModel._get_dtype_plan).bind(object(), torch.float32)
    inspect.signature(PreTrainedModel.named_non_persistent_buffers).bind(object())
    inspect.signature(WeightConverter.add_tensor).bind(object(), "target", "name", "pattern", torch.ones(1))
    inspect.signature(WeightConverter.convert).bind(object(), "target", model=None, config=None)
    assert hf.DecoderLayer is GradientCheckpointingLayer


def test_a_conversion_is_a_list_of_operations_on_patterns() -> None:
    transforms = get_model_conversion_mapping(skeleton_of("mixtral"))
    assert all(isinstance(t, WeightRenaming | WeightConverter) for t in transforms)
    (gate_up,) = [t for t in transforms if isinstance(t, WeightConverter) and len(t.source_patterns) == 2]
    assert [(type(op).__name__, op.dim) for op in gate_up.operations] == [
        ("MergeModulelist", 0),
        ("Concatenate", 1),
    ]


def test_a_checkpoint_name_is_renamed_and_tells_its_pattern() -> None:
    model: Any = skeleton_of("mixtral")
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]

    def renamed(name: str) -> tuple[str, str | None]:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, model.state_dict())
        return target, pattern

    target, pattern = renamed("model.layers.1.block_sparse_moe.experts.4.w2.weight")
    assert target == "model.layers.1.mlp.experts.down_proj"
    assert pattern in {p for c in converters for p in c.source_patterns}
    assert renamed("model.norm.weight") == ("model.norm.weight", None)
    assert renamed("norm.weight") == ("model.norm.weight", None)  # the base model's own file


# -- the skeleton ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_skeleton_has_the_names_shapes_and_dtypes_of_from_pretrained(
    name: str, dtype: torch.dtype, tiny: MakeTiny
) -> None:
    skeleton, reference = skeleton_of(name, dtype), from_pretrained(tiny(name), dtype)
    expected = {n: (t.shape, t.dtype) for n, t in reference.state_dict().items()}
    assert {n: (t.shape, t.dtype) for n, t in skeleton.state_dict().items()} == expected
    if name == "nemotron_h":  # its router's correction stays in float32
        assert torch.float32 in {kept for _, kept in expected.values()}
    assert all(t.device.type == "meta" for t in skeleton.state_dict().values())
    assert not skeleton.training
    assert not any(p.requires_grad for p in skeleton.parameters())


def test_tied_weights_are_one_object() -> None:
    skeleton: Any = skeleton_of("llama_tied")
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UnsupportedModelError, match="no_such_model") as refused:
        hf.load_config(tmp_path)
    assert refused.value.hint
    (tmp_path / "config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="cannot read"):
        hf.load_config(tmp_path)


def test_what_is_no_causal_language_model_is_refused() -> None:
    from transformers import CLIPConfig

    with pytest.raises(UnsupportedModelError, match="CLIPConfig"):
        hf.build_skeleton(CLIPConfig(), torch.float32)


# -- buffers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rebuilt_buffers_equal_those_of_from_pretrained(name: str, tiny: MakeTiny) -> None:
    skeleton, reference = skeleton_of(name), from_pretrained(tiny(name))
    hf.rebuild_buffers(skeleton)
    expected = dict(hf.non_persistent_buffers(reference))
    rebuilt = dict(hf.non_persistent_buffers(skeleton))
    assert rebuilt.keys() == expected.keys()
    if name not in ("nemotron_h", "kimi_linear"):  # they have no positions
        assert any("inv_freq" in buffer for buffer in expected)
    for buffer, value in expected.items():
        assert rebuilt[buffer].dtype == value.dtype
        assert torch.equal(rebuilt[buffer], value), buffer
    assert all(p.device.type == "meta" for p in skeleton.parameters())


def test_rebuilding_leaves_weights_that_are_there_alone() -> None:
    model = TINY["qwen3_next"].model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hf.rebuild_buffers(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# -- names -------------------------------------------------------------------------------------------------------------


def test_names_go_to_parameters_groups_or_nowhere(tiny: MakeTiny) -> None:
    names = open_checkpoint(tiny("mixtral")).tensors
    extra = ["model.layers.9.self_attn.q_proj.weight", "vision.patch.weight"]
    renamed, groups, nowhere = map_checkpoint_names(skeleton_of("mixtral"), [*names, *extra])
    assert sorted(nowhere) == sorted(extra)
    assert renamed["model.layers.3.mlp.gate.weight"] == "model.layers.3.block_sparse_moe.gate.weight"
    by_target = {group.target: group for group in groups}
    assert len(by_target) == 12
    group = by_target["model.layers.3.mlp.experts.gate_up_proj"]
    block = "model.layers.3.block_sparse_moe.experts"
    columns = list(group.sources.values())
    assert columns == [
        [f"{block}.{e}.w1.weight" for e in range(6)],
        [f"{block}.{e}.w3.weight" for e in range(6)],
    ]
    assert sorted([*renamed.values(), *(n for g in groups for n in g.names)]) == sorted(names)


def test_experts_are_taken_in_the_order_of_their_numbers() -> None:
    """Ten comes after two, though its name comes before."""
    config = TINY["qwen3_moe"].config()
    config.num_experts = 12
    skeleton = hf.build_skeleton(config, torch.float32)
    names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(12)]
    _, (group,), _ = map_checkpoint_names(skeleton, sorted(names))
    assert group.names == names


def test_of_two_tensors_for_one_parameter_its_own_name_wins_and_the_other_is_told(tiny: MakeTiny) -> None:
    skeleton = skeleton_of("llama")
    name, other = "model.norm.weight", "norm.weight"
    for given in ([name, other], [other, name]):
        renamed, _, nowhere = map_checkpoint_names(skeleton, given)
        assert (renamed[name], nowhere) == (name, [other])
    fused = "model.layers.0.mlp.experts.down_proj"
    parts = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(6)]
    renamed, groups, nowhere = map_checkpoint_names(skeleton_of("qwen3_moe"), [*parts, fused])
    assert (renamed, groups, nowhere) == ({fused: fused}, [], parts)
    assert tiny("llama").is_dir()


def test_what_transformers_passes_over_is_not_called_unused() -> None:
    skeleton = skeleton_of("llama")
    assert hf.ignored_unexpected(skeleton, "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not hf.ignored_unexpected(skeleton, "model.layers.0.self_attn.q_proj.weight")


# -- caches ----------------------------------------------------------------------------------------------------------


def test_the_cache_of_an_output_is_found_under_any_name() -> None:
    cache = DynamicCache()
    for name in ("cache", "past_key_values", "cache_params"):
        assert hf.cache_of(SimpleNamespace(logits=None, **{name: cache})) is cache
    assert hf.cache_of(SimpleNamespace(logits=None)) is None


def test_every_tensor_of_a_cache_is_found() -> None:
    cache = DynamicCache()
    keys, values = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    for layer in range(2):
        cache.update(keys, values, layer)
    assert sum(t.numel() for t in hf.tensors_in(cache)) == 2 * (keys.numel() + values.numel())
    assert list(hf.tensors_in({"a": [keys, (values,)]})) == [keys, values]
    assert list(hf.tensors_in(None)) == []


# -- files beside the weights ------------------------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_has_none(tiny: MakeTiny) -> None:
    assert hf.load_tokenizer(tiny("llama")) is None


def test_the_generation_config_is_the_folders_own_or_made_from_the_model(tiny: MakeTiny, tmp_path: Path) -> None:
    config = TINY["llama"].config()
    assert hf.load_generation_config(tmp_path, config).eos_token_id == config.eos_token_id
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(tmp_path)
    assert hf.load_generation_config(tmp_path, config).eos_token_id == [7, 9]


@pytest.mark.parametrize(
    "architectures",
    [None, [], [None], [5], ["NoSuchClass"], ["GenerationMixin"], ["LlamaModel"], ["Qwen3ForCausalLM"], ["Pipeline"]],
)
def test_a_class_that_the_checkpoint_cannot_mean_is_passed_over(architectures: Any) -> None:
    config = TINY["llama"].config()
    config.architectures = architectures
    assert type(hf.build_skeleton(config, torch.float32)).__name__ == "LlamaForCausalLM"


def test_the_class_that_the_checkpoint_names_is_built() -> None:
    config = Gemma3Config(text_config=TINY["gemma3"].config().to_dict(), vision_config={"num_hidden_layers": 1})
    config.architectures = ["Gemma3ForConditionalGeneration"]
    assert type(hf.build_skeleton(config, torch.float32)).__name__ == "Gemma3ForConditionalGeneration"


def test_code_that_the_checkpoint_brings_goes_before_a_class_of_its_name(tmp_path: Path) -> None:
    TINY["llama"].save(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from transformers import LlamaForCausalLM as Theirs\n\n\nclass LlamaForCausalLM(Theirs):\n    mine = True\n"
    )
    file = tmp_path / "config.json"
    told = json.loads(file.read_text()) | {"auto_map": {"AutoModelForCausalLM": "mine.LlamaForCausalLM"}}
    file.write_text(json.dumps(told))
    for trusted in (True, False):
        config = hf.load_config(tmp_path, trust_remote_code=trusted)
        skeleton = hf.build_skeleton(config, torch.float32, trust_remote_code=trusted)
        assert getattr(skeleton, "mine", False) is trusted


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="it is installed")
def test_what_a_model_needs_and_is_not_installed_is_in_the_hint() -> None:
    with pytest.raises(UnsupportedModelError, match="packages that it needs are not installed") as refused:
        hf.build_skeleton(Gemma3nConfig(), torch.float32)
    assert "pip install" in (refused.value.hint or "")
    assert "timm" in (refused.value.hint or "")


WORDS = ("experts", "layers", "w1", "w2", "w10", "w", "wa", "0", "2", "10", "007", "a-b", "a_b", "")
SEGMENTS = st.lists(st.sampled_from(WORDS), min_size=1)


@hypothesis.given(st.lists(SEGMENTS.map(".".join), max_size=12, unique=True))
def test_names_are_in_transformers_order_and_those_of_a_blocks_experts_together(names: list[str]) -> None:
    blocks = list(_blocks(names))
    assert sorted(name for block in blocks for name in block) == sorted(names)
    assert all(sorted(block, key=dot_natural_key) == sorted(block, key=_expert_of) for block in blocks)
    assert all(block == sorted(block, key=lambda name: (_expert_of(name), name)) for block in blocks)
    others = [block[0] for block in blocks if ".experts." not in block[0]]
    assert others == sorted(others, key=dot_natural_key)
    assert len({tuple(_without_expert(block[0])) for block in blocks}) == len(blocks)
    assert all(len({tuple(_without_expert(name)) for name in block}) == 1 for block in blocks)


def _expert_of(name: str) -> int:
    number = name.partition(".experts.")[2].partition(".")[0]
    return int(number) if number.isdecimal() else -1


def _without_expert(name: str) -> list[str]:
    before, experts, after = name.partition(".experts.")
    number, _, weight = after.partition(".")
    return [before, experts, weight] if number.isdecimal() else [name]


def test_experts_are_renamed_alike_where_the_first_and_the_last_are() -> None:
    asked: list[str] = []

    def target_of(name: str) -> tuple[str, str | None]:
        asked.append(name)
        block, _, rest = name.partition(".experts.")
        number, _, which = rest.partition(".")
        if block == "odd" and number == "11":
            return f"odd.experts.{number}.{which}", None
        return f"{block}.experts.{which}", which

    even, odd = ([f"{block}.experts.{n}.up.weight" for n in range(12)] for block in ("even", "odd"))
    assert list(_targets(even, target_of)) == [(even, ("even.experts.up.weight", "up.weight"))]
    assert asked == [even[0], even[-1]]
    found = list(_targets(odd, target_of))
    assert [names for names, _ in found] == [[name] for name in odd]
    assert found[11][1] == ("odd.experts.11.up.weight", None)
