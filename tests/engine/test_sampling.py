from __future__ import annotations

import math

import pytest
from transformers import GenerationConfig

from overspill.engine import SamplingParams
from overspill.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -1),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{field} is {value}\nhint: {field} must be "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}])
def test_cutting_a_greedy_choice_is_refused(cut: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="temperature 0 always takes the likeliest token"):
        SamplingParams(**cut)
    SamplingParams(temperature=0.1, **cut)


def test_greedy_is_no_sampling() -> None:
    config = GenerationConfig(**SamplingParams(max_tokens=7).generation_arguments())
    assert (config.max_new_tokens, config.do_sample) == (7, False)


def test_sampling_is_stated_whole() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=0)
    config = GenerationConfig(**params.generation_arguments())
    # 0 and not None: transformers' own default cuts at the 50 likeliest.
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (True, 0.7, 0.9, 0)
