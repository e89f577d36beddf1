"""What is common to all engines: the door, the shell line and JSON."""

from __future__ import annotations

import json
import shlex

import pytest
from advised import line_with, made, uva

from overspill.advice import ENGINES, Advice, advise, as_json, render
from overspill.errors import ConfigError
from tiny_models import MakeTiny

AWKWARD = Advice(
    "llama.cpp",
    ("llama-server", "-ot", r"^blk\.(1|3)\.ffn_up\.weight$=CPU", "-m", "my model's.gguf"),
    {"SOME_VARIABLE": "a b", "OTHER": "1"},
    ("a note",),
    ("do this",),
    3 << 29,
)


def test_the_first_line_is_the_command_and_the_rest_are_comments() -> None:
    first, *rest = render(AWKWARD).splitlines()
    assert shlex.split(first) == ["SOME_VARIABLE=a b", "OTHER=1", *AWKWARD.command]
    assert all(line.startswith("# ") for line in rest)
    assert rest[0] == "# llama.cpp cannot: do this"
    assert rest[1] == "# note: a note"
    assert "1.50 GiB" in rest[-1]
    assert f"{3 << 29} bytes" in rest[-1]
    assert shlex.split(render(AWKWARD), comments=True) == shlex.split(first), "it can be pasted whole"


def test_json_says_the_same() -> None:
    said = json.loads(json.dumps(as_json(AWKWARD)))
    assert said == {
        "engine": "llama.cpp",
        "shell": AWKWARD.shell,
        "command": list(AWKWARD.command),
        "environment": {"SOME_VARIABLE": "a b", "OTHER": "1"},
        "cannot": ["do this"],
        "notes": ["a note"],
        "host_bytes": 3 << 29,
    }


def test_each_engine_answers_by_its_name(tiny: MakeTiny) -> None:
    programs = [made(tiny("llama")).told(engine).command[0] for engine in ENGINES]
    assert programs == ["vllm", "llama-server", "overspill"]
    assert [made(tiny("llama")).told(engine).engine for engine in ENGINES] == list(ENGINES)


def test_an_unknown_engine_is_refused_with_the_nearest(tiny: MakeTiny) -> None:
    made_ = made(tiny("llama"))
    with pytest.raises(ConfigError, match=r'"emit" is "llamacpp".*vllm llama\.cpp overspill') as refused:
        advise(made_.plan, made_.settings, "llamacpp", model_name="m")
    assert refused.value.hint == 'did you mean "llama.cpp"?'
    with pytest.raises(ConfigError, match='"emit" is "xyz"') as refused:
        made_.told("xyz")
    assert refused.value.hint


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_plan_says_of_itself_is_said_with_its_advice(engine: str, tiny: MakeTiny) -> None:
    made_ = made(tiny("llama"), uva(1 << 30))
    told = made_.told(engine)
    line_with(told.notes, "of this plan: the offload is not needed")
    line_with(told.notes, "of this plan: cpu_offload_gb asks for 1.00 GiB")


@pytest.mark.parametrize(("engine", "ranks"), [("vllm", 0), ("llama.cpp", 2), ("overspill", 2)])
def test_ranks_that_an_engine_cannot_have_are_refused(engine: str, ranks: int, tiny: MakeTiny) -> None:
    with pytest.raises(ConfigError, match=f'"ranks" is {ranks}'):
        made(tiny("llama")).told(engine, ranks=ranks)
