from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.cli.arguments import LISTS, normalise
from overspill.errors import ConfigError

WORD = st.text("abc.-_0", min_size=1).filter(lambda word: not word.startswith("-"))
LIST = st.tuples(st.sampled_from(sorted(LISTS)), st.lists(WORD, min_size=1, max_size=3))
OTHER = st.tuples(st.sampled_from(["--device", "--prompt"]), st.lists(WORD, min_size=1, max_size=1))
SWITCH = st.tuples(st.just("--json"), st.just([]))


def parser(**lists: object) -> argparse.ArgumentParser:
    """As vLLM's: argparse."""
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("model")
    for name in sorted(LISTS):
        made.add_argument(name, **lists)
    made.add_argument("--device", action="append")
    made.add_argument("--prompt", action="append")
    made.add_argument("--json", action="store_true")
    return made


@given(WORD, st.lists(LIST | OTHER | SWITCH, max_size=5))
def test_a_list_means_what_it_means_to_vllm(model: str, options: list[tuple[str, list[str]]]) -> None:
    arguments = [model, *(word for name, values in options for word in (name, *values))]
    expected = parser(nargs="+", action="extend").parse_args(arguments)
    assert parser(action="append").parse_args(normalise(arguments)) == expected
    assert normalise(normalise(arguments)) == normalise(arguments)


@given(st.lists(WORD, min_size=1, max_size=4))
def test_underscores_and_dashes_are_one_spelling(names: list[str]) -> None:
    dashes = normalise(["plan", "m", "--cpu-offload-params", *names, "--json"])
    assert normalise(["plan", "m", "--cpu_offload_params", *names, "--json"]) == dashes
    assert dashes == ["plan", "m", *(part for name in names for part in ("--cpu-offload-params", name)), "--json"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "m", "--prompt", "--a_b", "--max_tokens", "3"],
        ["run", "m", "--offload-params=x", "y"],
        ["run", "m", "--temperature", "-1", "--prompt", "-"],
        ["run", "--", "--offload-params", "x"],
        [],
    ],
)
def test_everything_else_stays_as_it_is(arguments: list[str]) -> None:
    assert normalise(arguments) == arguments


def test_two_dashes_end_a_list() -> None:
    assert normalise(["plan", "--offload-params", "x", "--", "m"]) == ["plan", "--offload-params", "x", "--", "m"]


@pytest.mark.parametrize("rest", [[], ["--json"], ["--", "m"], ["--offload-params", "x"]])
def test_a_list_of_nothing_is_refused(rest: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--cpu-offload-params names no weight\nhint: "):
        normalise(["plan", "m", "--cpu_offload_params", *rest])
