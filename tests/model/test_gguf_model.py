"""GGUF files written from tiny random models as llama.cpp's converter does, and read back into the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from emulated_runs import forward, placed
from gguf_files import BASE, CASES, FIELDS, LAYERS, LLAMA_FORWARD, Case, file_tensors, save_gguf, tiny_model, write_gguf
from overspill.checkpoint import Checkpoint, Encoding, Extent, TensorRecord
from overspill.errors import CheckpointError, UnsupportedModelError
from overspill.model import gguf_blocks, hf_gguf
from overspill.model.gguf import (
    config_from_gguf,
    dequantize,
    generation_config_from_gguf,
    sources_from_gguf,
    sources_of_gguf,
    tokenizer_from_gguf,
    unused_tensors,
)
from overspill.model.sources import Conversion, Extents


def raw_bytes(record: TensorRecord) -> torch.Tensor:
    data = record.extent.file.read_bytes()[record.extent.offset : record.extent.offset + record.extent.length]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def skeleton(checkpoint: Checkpoint) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_from_gguf(checkpoint))


def load(checkpoint: Checkpoint) -> nn.Module:
    """The model, through the configuration and the sources; every parameter must have one or be tied."""
    sources = sources_from_gguf(checkpoint, skeleton(checkpoint))
    assert unused_tensors(checkpoint, sources) == ()
    weights = {
        name: source.read([raw_bytes(record) for record in source.records], torch.float32)
        for name, source in sources.items()
    }
    model = AutoModelForCausalLM.from_config(config_from_gguf(checkpoint)).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= set(model._tied_weights_keys or ())
    assert not unexpected
    return model


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("name", CASES)
def test_a_written_model_comes_back(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = tiny_model(case)
    checkpoint = write_gguf(tmp_path / "m.gguf", case.architecture, case.fields, file_tensors(case, model))
    loaded = load(checkpoint)
    sources = sources_from_gguf(checkpoint, skeleton(checkpoint))
    for key, expected in model.state_dict().items():
        found = loaded.state_dict()[key]
        rounds = key in sources and any(re.fullmatch(case.close, r.name) for r in sources[key].records)
        if rounds:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        else:
            assert torch.equal(found, expected), key
    assert logits(model).std() > 1e-3
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, by byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ Ġ", "Ã ©", "1 2"]
BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "<|end|>",
        *byte_alphabet(),
        *(m.replace(" ", "") for m in MERGES),
    ],
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (256 + len(MERGES))],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{% for m in messages %}<s>{{ m.role }} {{ m.content }}<|end|>{% endfor %}",
}
PIECES = ["▁", *"helowrd12", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "ld", "▁wor", "▁world"]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES],
    "tokenizer.ggml.scores": [0.0] * 259 + [float(-i) for i in range(len(PIECES))],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
    "tokenizer.ggml.unknown_token_id": 0,
}
# Ids that transformers' own loaders (5.17 and 5.24) give for these files.
BYTE_LEVEL_GOLDEN = {
    "hello world": [262, 267],
    " hello  world": [35, 262, 35, 267],
    "": [],
    "\n\t hello\r\n": [13, 12, 35, 262, 16, 13],
    "12 1212 3.5": [270, 35, 270, 270, 35, 54, 49, 56],
    "café — “日本” 🙂": [
        *(102, 100, 105, 269, 35, 229, 131, 151, 35, 229, 131, 159, 233, 154, 168),
        *(233, 159, 175, 229, 131, 160, 35, 243, 162, 156, 133),
    ],
    "<s>hello<|end|>": [1, 262, 2],
    "</s> world": [63, 50, 118, 65, 267],
    "he's HELLO": [259, 42, 118, 35, 75, 72, 79, 79, 82],
    "  ": [268],
}
SENTENCEPIECE_GOLDEN = {
    "hello world": [273, 278],
    "": [],
    "\n\t hello\r\n": [259, 13, 12, 273, 16, 13],
    "12 1212 3.5": [259, 267, 268, 259, 267, 268, 267, 268, 259, 54, 49, 56],
    "café — “日本” 🙂": [
        *(259, 102, 100, 105, 198, 172, 259, 229, 131, 151, 259, 229, 131, 159, 233, 154, 168),
        *(233, 159, 175, 229, 131, 160, 259, 243, 162, 156, 133),
    ],
    "he's HELLO": [259, 269, 42, 118, 259, 75, 72, 79, 79, 82],
}


def tokenizer_of(tmp_path: Path, metadata: Mapping[str, Any]) -> Any:
    return tokenizer_from_gguf(write_gguf(tmp_path / "t.gguf", "llama", FIELDS, {}, metadata))


def test_byte_level_tokenizer_gives_the_golden_ids(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, BYTE_LEVEL)
    assert {text: tokenizer(text)["input_ids"] for text in BYTE_LEVEL_GOLDEN} == BYTE_LEVEL_GOLDEN
    assert {text: tokenizer.decode(ids) for text, ids in BYTE_LEVEL_GOLDEN.items()} == {t: t for t in BYTE_LEVEL_GOLDEN}
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "<|end|>", "<unk>")
    assert len(tokenizer) == len(BYTE_LEVEL["tokenizer.ggml.tokens"])
    assert max(tokenizer("<|endoftext|>")["input_ids"]) < len(tokenizer)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<s>user hello<|end|>"


def test_sentencepiece_tokenizer_gives_the_golden_ids_after_bos(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, SENTENCEPIECE)
    found = {text: tokenizer(text)["input_ids"] for text in SENTENCEPIECE_GOLDEN}
    assert found == {text: [1, *ids] for text, ids in SENTENCEPIECE_GOLDEN.items()}
    assert tokenizer.decode(found["hello world"], skip_special_tokens=True).strip() == "hello world"


@pytest.mark.parametrize(("metadata", "add"), [(BYTE_LEVEL, True), (SENTENCEPIECE, False)])
def test_the_file_decides_about_bos(tmp_path: Path, metadata: Mapping[str, Any], add: bool) -> None:
    tokenizer = tokenizer_of(tmp_path, {**metadata, "tokenizer.ggml.add_bos_token": add})
    assert (tokenizer("hello")["input_ids"][0] == 1) is add


def test_a_file_without_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path, {}) is None


def test_an_unknown_kind_of_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = write_gguf(tmp_path / "t.gguf", "lfm2", FIELDS, {}, {**BYTE_LEVEL, "tokenizer.ggml.model": "rwkv"})
    with pytest.raises(UnsupportedModelError, match="rwkv"):
        tokenizer_from_gguf(checkpoint)


def test_the_configuration_takes_the_special_tokens_of_the_file(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", FIELDS, {}, {**BYTE_LEVEL, **metadata})
    config, generation = config_from_gguf(checkpoint), generation_config_from_gguf(checkpoint)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, [2, 5], 0)
    assert config.vocab_size == len(BYTE_LEVEL["tokenizer.ggml.tokens"])


def test_a_special_token_that_no_token_has_is_none(tmp_path: Path) -> None:
    metadata = {**BYTE_LEVEL, "tokenizer.ggml.unknown_token_id": 2**32 - 1}
    assert tokenizer_of(tmp_path, metadata).unk_token is None


def test_a_mistral_is_known_by_its_name(tmp_path: Path) -> None:
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", FIELDS, {}, {"general.name": "mistral"})
    assert config_from_gguf(checkpoint).model_type == "mistral"


def test_a_27b_gemma_scales_its_queries_by_its_width(tmp_path: Path) -> None:
    fields = {**FIELDS, "block_count": 46, "attention.key_length": 32}
    config = config_from_gguf(write_gguf(tmp_path / "m.gguf", "gemma2", fields, {}))
    assert (config.head_dim, config.query_pre_attn_scalar) == (32, 16)


# ---- what is refused


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    checkpoint = write_gguf(tmp_path / "m.gguf", "rwkv7", {}, {})
    with pytest.raises(UnsupportedModelError, match=r"'rwkv7'.*llama, .*qwen3moe") as caught:
        config_from_gguf(checkpoint)
    assert caught.value.hint


def test_the_architectures_that_transformers_maps() -> None:
    causal = {case.architecture for case in CASES.values()}
    assert causal <= set(hf_gguf.known_architectures())
    assert not {"t5", "t5encoder", "deci", "general", "tokenizer"} & set(hf_gguf.known_architectures())


def test_a_header_without_a_needed_key_is_damaged(tmp_path: Path) -> None:
    fields = {key: value for key, value in FIELDS.items() if key != "block_count"}
    with pytest.raises(CheckpointError, match=r"llama\.block_count"):
        config_from_gguf(write_gguf(tmp_path / "m.gguf", "llama", fields, {}))


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("llama", {"attention.head_count_kv": [2, 4]}, "differs between layers"),
        ("llama", {"rope.scaling.type": "su"}, "'su'"),
        ("falcon", {"attention.head_count_kv": 2}, "more than one key head"),
        ("llama", {"embedding_length": "wide"}, "refuses"),
    ],
)
def test_what_transformers_cannot_express_is_refused(
    architecture: str, fields: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint = write_gguf(tmp_path / "m.gguf", architecture, {**FIELDS, **fields}, {})
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_gguf(checkpoint)


def llama_tensors() -> dict[str, torch.Tensor]:
    return file_tensors(CASES["llama"], tiny_model(CASES["llama"]))


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"blk.1.ffn_up.weight": torch.zeros(64, 96)}
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", FIELDS, tensors)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj.*\[96, 64\].*blk\.1\.ffn_up.*\[64, 96\]"):
        sources_from_gguf(checkpoint, skeleton(checkpoint))


def test_a_parameter_that_the_file_lacks_has_no_source(tmp_path: Path) -> None:
    tensors = llama_tensors()
    del tensors["blk.0.ffn_up.weight"]
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", FIELDS, tensors)
    model = skeleton(checkpoint)
    assert set(model.state_dict()) - set(sources_from_gguf(checkpoint, model)) == {"model.layers.0.mlp.up_proj.weight"}


def test_tensors_that_nothing_is_made_of_are_named(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"blk.0.attn_q.bias": torch.zeros(64), "mystery.weight": torch.zeros(2)}
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", FIELDS, tensors)
    sources = sources_from_gguf(checkpoint, skeleton(checkpoint))
    assert set(unused_tensors(checkpoint, sources)) == {"blk.0.attn_q.bias", "mystery.weight"}


# ---- rotary frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama3_frequencies_are_taken_up(tmp_path: Path) -> None:
    case = Case("llama", "llama", {**BASE, "head_dim": 64, "rope_parameters": LLAMA3}, FIELDS, LLAMA_FORWARD)
    model = tiny_model(case)
    plain = 5000.0 ** (-torch.arange(32) / 32)
    factors = plain / model.model.rotary_emb.inv_freq
    assert factors.max() == pytest.approx(8.0, rel=1e-5)
    assert factors.min() == pytest.approx(1.0)
    tensors = file_tensors(case, model) | {"rope_freqs.weight": factors}
    loaded = load(write_gguf(tmp_path / "m.gguf", "llama", {**FIELDS, "attention.key_length": 64}, tensors))
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)


def test_other_frequencies_are_refused_by_index(tmp_path: Path) -> None:
    factors = torch.tensor([1.0, 3.0, 1.0, 8.0, 8.0, 8.0, 8.0, 8.0])
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", FIELDS, {"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModelError, match="divides frequency 1 by 3"):
        config_from_gguf(checkpoint)


def test_long_and_short_factors_become_longrope(tmp_path: Path) -> None:
    short, long = torch.linspace(1, 1.5, 8), torch.linspace(1, 40, 8)
    checkpoint = write_gguf(
        tmp_path / "m.gguf",
        "phi3",
        {**FIELDS, "rope.scaling.original_context_length": 32},
        {"rope_factors_short.weight": short, "rope_factors_long.weight": long},
    )
    rope = config_from_gguf(checkpoint).rope_parameters
    assert (rope["rope_type"], rope["short_factor"], rope["long_factor"]) == (
        "longrope",
        short.tolist(),
        long.tolist(),
    )
    assert (rope["original_max_position_embeddings"], rope["factor"]) == (32, 4.0)


# ---- packed blocks


@pytest.mark.parametrize(("name", "steps"), [("Q8_0", 127 * 2), ("Q4_1", 15), ("Q4_0", 15)])
def test_a_packed_model_comes_back_within_its_steps(name: str, steps: int, tmp_path: Path) -> None:
    """Every weight within one step of its block's range, and exactly what the gguf package decodes."""
    case, kind = CASES["llama"], GGMLQuantizationType[name]
    model = tiny_model(case)
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", case.fields, file_tensors(case, model), ggml_type=kind)
    assert checkpoint.tensors["blk.0.attn_q.weight"].encoding.name == name
    loaded = load(checkpoint)
    for key, expected in model.state_dict().items():
        found = loaded.state_dict()[key]
        reach = 2 * expected.abs().max()
        assert (found - expected).abs().max() <= 1.01 * reach / steps, key
    weight = "model.layers.1.mlp.down_proj.weight"
    reference = gguf.quants.dequantize(gguf.quants.quantize(model.state_dict()[weight].numpy(), kind), kind)
    assert np.array_equal(loaded.state_dict()[weight].numpy(), reference)


def test_a_packed_moe_comes_back_within_its_steps(tmp_path: Path) -> None:
    case, kind = CASES["qwen3moe"], GGMLQuantizationType.Q8_0
    model = tiny_model(case)
    checkpoint = write_gguf(
        tmp_path / "m.gguf", case.architecture, case.fields, file_tensors(case, model), ggml_type=kind
    )
    assert checkpoint.tensors["blk.0.ffn_gate_exps.weight"].encoding.packed
    found = load(checkpoint).state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
    torch.testing.assert_close(found, model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"], rtol=0, atol=2e-3)


def test_gate_and_up_in_one_tensor_are_taken_as_they_lie(tmp_path: Path) -> None:
    case = CASES["qwen3moe"]
    model = tiny_model(case)
    tensors = file_tensors(case, model)
    for layer in range(LAYERS):
        halves = [tensors.pop(f"blk.{layer}.ffn_{which}_exps.weight") for which in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat(halves, dim=1)
    checkpoint = write_gguf(tmp_path / "m.gguf", case.architecture, case.fields, tensors)
    source = sources_from_gguf(checkpoint, skeleton(checkpoint))["model.layers.0.mlp.experts.gate_up_proj"]
    assert source.convert is None
    torch.testing.assert_close(logits(load(checkpoint)), logits(model), rtol=1e-4, atol=1e-5)


def test_the_model_map_reads_dense_weights_in_place_and_decodes_the_rest(tmp_path: Path) -> None:
    case, kind = CASES["llama"], GGMLQuantizationType.Q8_0
    tensors = file_tensors(case, tiny_model(case))
    checkpoint = write_gguf(tmp_path / "m.gguf", "llama", case.fields, tensors, ggml_type=kind)
    model = skeleton(checkpoint).to(torch.bfloat16)
    sources, unused = sources_of_gguf(checkpoint, model)
    assert unused == ()
    assert set(sources) == set(model.state_dict())
    norm = sources["model.norm.weight"]
    assert isinstance(norm, Extents)
    assert norm.extents == (checkpoint.tensors["output_norm.weight"].extent,)
    for name, why in (("mlp.up_proj", "decoded from Q8_0"), ("self_attn.q_proj", "decoded from Q8_0, rearranged")):
        full = f"model.layers.0.{name}.weight"
        source = sources[full]
        assert isinstance(source, Conversion)
        assert source.why == why
        ((found, tensor),) = source.run([raw_bytes(record) for record in source.records]).items()
        assert (found, tensor.dtype, tensor.shape) == (full, torch.bfloat16, model.get_parameter(full).shape)


def test_reading_in_another_dtype_is_the_float32_tensor_rounded(tmp_path: Path) -> None:
    for name in ("llama", "qwen3moe"):
        case = CASES[name]
        tensors = file_tensors(case, tiny_model(case))
        path = tmp_path / f"{name}.gguf"
        checkpoint = write_gguf(path, case.architecture, case.fields, tensors, ggml_type=GGMLQuantizationType.Q8_0)
        for source in sources_from_gguf(checkpoint, skeleton(checkpoint)).values():
            raw = [raw_bytes(record) for record in source.records]
            exact = source.read(raw, torch.float32)
            assert torch.equal(source.read(raw, torch.bfloat16), exact.to(torch.bfloat16))


def record_of(name: str, shape: tuple[int, ...], block: tuple[int, int]) -> TensorRecord:
    encoding = Encoding(name, *block)
    elements = int(np.prod(shape))
    return TensorRecord("t", encoding, shape, Extent(Path("t.gguf"), 0, encoding.nbytes(elements)))


DECODED = sorted(kind.name for kind in gguf.quants._type_traits if kind.name != "BF16")


@pytest.mark.parametrize("name", DECODED)
@settings(max_examples=4, deadline=None)
@given(rows=st.integers(1, 5), seed=st.integers(0, 2**16))
def test_every_packed_type_decodes_as_the_gguf_package_does(name: str, rows: int, seed: int) -> None:
    kind = GGMLQuantizationType[name]
    block = GGML_QUANT_SIZES[kind]
    record = record_of(name, (rows, 512), block)
    raw = np.random.default_rng(seed).integers(0, 256, record.nbytes, dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.reshape(rows, -1), kind)
        found = dequantize(raw, record)
    assert found.shape == (rows, 512)
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), expected, equal_nan=True)


def test_slices_meet_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of("Q4_1", (7, 96), (32, 20))
    raw = gguf.quants.quantize(
        np.random.default_rng(0).normal(size=(7, 96)).astype(np.float32), GGMLQuantizationType.Q4_1
    )
    whole = dequantize(raw.reshape(-1), record)
    monkeypatch.setattr(gguf_blocks, "SLICE_ELEMENTS", 64)
    assert torch.equal(dequantize(raw.reshape(-1), record), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_dense_record_keeps_its_values(dtype: torch.dtype) -> None:
    values = torch.linspace(-2, 2, 12, dtype=dtype)
    raw = values.view(torch.uint8)
    record = record_of(str(dtype).removeprefix("torch."), (3, 4), (1, dtype.itemsize))
    found = dequantize(raw, record)
    assert torch.equal(found, values.float().view(3, 4))
    assert (found.data_ptr() == raw.data_ptr()) is (dtype == torch.float32)


def test_a_dense_record_may_lie_unaligned() -> None:
    values = torch.arange(4.0)
    shifted = torch.empty(17, dtype=torch.uint8)[1:]
    shifted.copy_(values.view(torch.uint8))
    assert torch.equal(dequantize(shifted, record_of("float32", (4,), (1, 4))), values)


@pytest.mark.parametrize("name", ["Q9_9", "Q8_K"])
def test_a_type_that_nobody_decodes_is_refused_by_name(name: str) -> None:
    block = GGML_QUANT_SIZES[GGMLQuantizationType.Q8_K] if name == "Q8_K" else (32, 18)
    record = record_of(name, (256,), block)
    with pytest.raises(UnsupportedModelError, match=f"'t'.*{name}"):
        dequantize(np.zeros(record.nbytes, np.uint8), record)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_routed_experts_of_a_file_are_placed_by_its_own_names_and_streamed(name: str, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "m.gguf", name)
    ids = (5, 3, 9, 1, 7)
    resident, _, _ = forward(placed(path), ids)
    overrides = [{"pattern": r"blk\.1\.ffn_(gate|up|down)_exps\.weight", "device": "CPU"}]
    model = placed(path, {"overspill": {"placement": {"overrides": overrides}, "expert_stream": {"slots": 3}}})
    assert [block.layer for block in model.plan.placed] == [1]
    torch.testing.assert_close(forward(model, ids)[0], resident, rtol=0, atol=1e-4)
    model.experts.prove_used()
    for tier in ("host", "disk"):
        streamed = placed(path, {"overspill": {"expert_stream": {"slots": 3, "tier": tier}}})
        assert torch.equal(forward(streamed, ids)[0], resident)
        assert bool(streamed.plan.converted) is (tier == "disk")


def test_experts_that_lie_in_a_file_as_they_are_computed_with_stream_from_it(tmp_path: Path) -> None:
    case = CASES["qwen3moe"]
    tensors = file_tensors(case, tiny_model(case))
    for layer in range(LAYERS):
        halves = [tensors.pop(f"blk.{layer}.ffn_{which}_exps.weight") for which in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat(halves, dim=1)
    path = tmp_path / "m.gguf"
    write_gguf(path, case.architecture, case.fields, tensors)
    ids = (5, 3, 9, 1, 7)
    resident, _, _ = forward(placed(path), ids)
    streamed = placed(path, {"overspill": {"expert_stream": {"slots": 3, "tier": "disk"}}})
    assert torch.equal(forward(streamed, ids)[0], resident)
