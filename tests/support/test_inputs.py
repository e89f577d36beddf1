"""Models that take a picture, sound, or text for an encoder: the whole of them is loaded, and run from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Llama4Config,
    Llama4ForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import overspill
from architectures import tiny
from emulated_runs import mapped
from overspill.engine import SamplingParams
from overspill.engine.tokens import refuse_no_text
from overspill.errors import UnsupportedModelError
from overspill.model.weights import Role
from overspill.plan import Tier
from tiny_models import draw_weights

EVERYTHING = {"uva": {"cpu_offload_gb": 1}}


@pytest.mark.filterwarnings("ignore::overspill.errors.OverspillWarning")  # budgets above all there is, on purpose
@pytest.mark.parametrize("kind", ["qwen3_vl", "whisper (sound)"])
def test_what_a_picture_or_sound_says_is_told_from_offloaded_weights(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    live = model.model()
    live.save_pretrained(tmp_path)
    placed = overspill.load(tmp_path, EVERYTHING, device="emulated", max_model_len=32).placed
    assert model.inputs is not None
    asked = {"max_new_tokens": 4, "do_sample": False}
    with placed.running():
        inputs = {name: placed.device.to_device(tensor) for name, tensor in model.inputs.items()}
        answer = placed.model.generate(**inputs, **asked)
    with torch.no_grad():
        assert torch.equal(answer, live.generate(**model.inputs, **asked))
    assert {p.weight.role for p in placed.plan.on(Tier.HOST)} >= {Role.TOWER, Role.EMBEDDING, Role.HEAD}


def test_of_a_small_budget_the_tower_goes_first_since_decoding_does_not_read_it(tmp_path: Path) -> None:
    tiny("qwen3_vl").model().save_pretrained(tmp_path)
    tower = sum(weight.nbytes for weight in mapped(tmp_path) if weight.role is Role.TOWER)
    plan = overspill.plan(tmp_path, {"uva": {"cpu_offload_gb": tower / 2 / (1 << 30)}}, device="emulated")
    assert {p.weight.step_bytes(1) for p in plan.on(Tier.HOST)} == {0}
    assert plan.step.link_bytes == 0
    assert {p.reason for p in plan.on(Tier.HOST)} == {"budget: decoding text does not read it"}


def test_an_encoder_decoder_answers_text(tmp_path: Path) -> None:
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=3, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    live = T5ForConditionalGeneration(config).eval()
    draw_weights(live)
    live.save_pretrained(tmp_path)
    prompt = [5, 17, 40, 3]
    engine = overspill.load(tmp_path, {"prefetch": {"offload_group_size": 1}}, device="emulated", max_model_len=32)
    answer = engine.generate(prompt, SamplingParams(max_tokens=5), ignore_eos=True)
    with torch.no_grad():
        expected = live.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert answer.token_ids == expected[0, 1:].tolist()
    assert engine.plan.ring is not None
    assert {layer.stack for layer in engine.plan.ring.layers} == {"decoder.block"}
    with pytest.raises(UnsupportedModelError, match="reads a prompt with an encoder"):
        refuse_no_text(engine.plan.model, by_steps="serve")


def test_text_for_a_model_of_sound_is_refused(tmp_path: Path) -> None:
    tiny("whisper (sound)").model().save_pretrained(tmp_path)
    engine = overspill.load(tmp_path, device="emulated", max_model_len=32)
    with pytest.raises(UnsupportedModelError, match="is given input_features, and no text"):
        engine.generate([5])
    with pytest.raises(UnsupportedModelError, match="is given input_features, and no text"):
        overspill.compare(tmp_path, candidate=EVERYTHING, prompts=[[5]], max_tokens=4, device="emulated")


@pytest.mark.filterwarnings("ignore::overspill.errors.OverspillWarning")
def test_where_transformers_cannot_run_the_whole_over_text_the_language_model_alone_is_loaded(tmp_path: Path) -> None:
    """As it is with Llama 4 in transformers 5.24."""
    text = tiny("llama4").config.text_config
    config = Llama4Config(text_config=text.to_dict(), vision_config=tiny("llama4").config.vision_config.to_dict())
    torch.manual_seed(0)
    Llama4ForConditionalGeneration(config).save_pretrained(tmp_path)
    plan = overspill.plan(tmp_path, EVERYTHING, device="emulated", max_model_len=32)
    if plan.model.architecture == "Llama4ForConditionalGeneration":
        pytest.skip("this transformers runs it")
    assert plan.model.architecture == "Llama4ForCausalLM"
    assert any("does not run over text in this transformers" in note for note in plan.notes)
    engine = overspill.load(tmp_path, EVERYTHING, device="emulated", max_model_len=32)
    assert engine.generate([5, 6], SamplingParams(max_tokens=2)).token_ids


def test_a_checkpoint_whose_towers_were_taken_away_is_loaded_as_its_language_model(tmp_path: Path) -> None:
    live = tiny("qwen3_5").config
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(live)
    whole.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "visual" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    plan = overspill.plan(tmp_path, device="emulated", max_model_len=32)
    assert plan.model.architecture == "Qwen3_5ForCausalLM"
    assert any("has not all of the class that it names" in note for note in plan.notes)
    tensors.pop(next(name for name in tensors if "mlp" in name))
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"model\.visual"):
        overspill.plan(tmp_path, device="emulated", max_model_len=32)


def test_an_encoder_decoder_without_a_first_token_says_so(tmp_path: Path) -> None:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    engine = overspill.load(tmp_path, device="emulated", max_model_len=32)
    with pytest.raises(UnsupportedModelError, match="no token that its decoder starts with"):
        engine.generate([5, 6], SamplingParams(max_tokens=2))
    with pytest.raises(UnsupportedModelError, match="reads a prompt with an encoder"):
        overspill.compare(tmp_path, candidate=EVERYTHING, prompts=[[5]], max_tokens=2, device="emulated")
