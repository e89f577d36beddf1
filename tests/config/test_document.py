from __future__ import annotations

import json
import warnings
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from overspill.config import GIB, OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig, parse_offload_config
from overspill.errors import ConfigError, OverspillWarning

PREFETCH_IGNORED = "Prefetch offload fields are set but offload_backend='uva'. Prefetch settings will be ignored."
UVA_IGNORED = "UVA offload fields are set but offload_backend='prefetch'. UVA settings will be ignored."
BOTH_SET = (
    "Both UVA and prefetch offload fields are set with offload_backend='auto'. Prefetch backend will be "
    "selected. Set offload_backend explicitly to suppress this warning."
)


def uva(**fields: Any) -> dict[str, Any]:
    return {"uva": fields}


def prefetch(**fields: Any) -> dict[str, Any]:
    return {"prefetch": fields}


def refused(document: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_offload_config(document)
    return caught.value


@pytest.mark.parametrize("document", [None, "", "  \n", "null", "{}", {}, '{"uva": null, "overspill": null}'])
def test_nothing_asked_for_is_vllms_default(document: Any) -> None:
    config = parse_offload_config(document)
    assert config == OffloadConfig()
    assert (config.offload_backend, config.resolved_backend, config.offloads) == ("auto", None, False)
    assert (config.uva.cpu_offload_gb, config.uva.cpu_offload_params) == (0, frozenset())
    p = config.prefetch
    assert (p.offload_group_size, p.offload_num_in_group, p.offload_prefetch_step) == (0, 1, 1)
    assert p.offload_params == frozenset()
    assert config.overspill is None
    assert config.extension.order == "traffic"


# anchors: vLLM's behaviour table of odd inputs. What vLLM itself answers, on its own models.
@pytest.mark.parametrize(
    ("document", "text"),
    [
        (uva(cpu_offload_gb=-1), "Input should be greater than or equal to 0"),
        (uva(cpu_offload_gb="abc"), "Input should be a valid number, unable to parse string as a number"),
        (uva(cpu_offload_gb=float("nan")), "Input should be greater than or equal to 0"),
        (uva(cpu_offload_params="experts"), "Input should be a valid set"),
        (
            prefetch(offload_group_size=1.5),
            "Input should be a valid integer, got a number with a fractional part",
        ),
        (prefetch(offload_num_in_group=0), "Input should be greater than or equal to 1"),
        (prefetch(offload_group_size=-1), "Input should be greater than or equal to 0"),
        (prefetch(offload_prefetch_step=-1), "Input should be greater than or equal to 0"),
        ({"offload_backend": "prefetch"}, "offload_num_in_group (1) must be <= offload_group_size (0)"),
        (
            {"offload_backend": "uva", **prefetch(offload_group_size=2, offload_num_in_group=3)},
            "offload_num_in_group (3) must be <= offload_group_size (2)",
        ),
        (
            prefetch(offload_group_size=2, offload_prefetch_step=0),
            "offload_prefetch_step (0) must be >= 1 when prefetch offloading is enabled (offload_group_size > 0)",
        ),
        ({"offload_backend": "disk"}, "Input should be 'auto', 'uva' or 'prefetch'"),
        (uva(cpu_offload_gb=True), "Input should be a valid number"),
        (prefetch(offload_group_size=True), "Input should be a valid integer"),
    ],
)
def test_vllm_refuses_in_its_words(document: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        OffloadConfig.model_validate(document)
    assert text in str(caught.value)
    error = refused(document)
    assert text in error.message
    assert error.message.startswith("offload config: ")
    assert error.hint


def test_vllm_refuses_none_as_a_set_where_the_door_takes_null_as_absent() -> None:
    with pytest.raises(ValidationError, match="Input should be a valid set"):
        UVAOffloadConfig(cpu_offload_params=None)  # type: ignore[arg-type]
    assert parse_offload_config(uva(cpu_offload_gb=1, cpu_offload_params=None)).uva.cpu_offload_params == frozenset()


@pytest.mark.parametrize(
    ("document", "path", "value"),
    [
        (uva(cpu_offload_gb="2.5"), "uva.cpu_offload_gb", 2.5),
        (
            uva(cpu_offload_gb=1, cpu_offload_params=["a", "b", "a"]),
            "uva.cpu_offload_params",
            frozenset({"a", "b"}),
        ),
        (prefetch(offload_group_size=2.0), "prefetch.offload_group_size", 2),
    ],
)
def test_vllm_accepts(document: dict[str, Any], path: str, value: object) -> None:
    section, key = path.split(".")
    for config in (OffloadConfig.model_validate(document), parse_offload_config(document)):
        assert getattr(getattr(config, section), key) == value


# What vLLM accepts without a word and moves nothing by.
@pytest.mark.parametrize(
    ("document", "texts"),
    [
        (uva(cpu_offload_gb=float("inf")), ['"uva.cpu_offload_gb" is inf', "finite"]),
        ('{"uva": {"cpu_offload_gb": 1e999}}', ['"uva.cpu_offload_gb" is inf', "finite"]),
        (uva(cpu_offload_gb=1e-12), ['"uva.cpu_offload_gb" is 1e-12', "less than a byte"]),
        ({"offload_backend": "uva"}, ['"offload_backend" is "uva"', '"uva.cpu_offload_gb" is 0']),
        (uva(cpu_offload_params=["experts"]), ['"uva.cpu_offload_params" is [', "experts", "cpu_offload_gb"]),
        (prefetch(offload_params=["mlp"]), ['"prefetch.offload_params"', "mlp", "offload_group_size"]),
        (
            {**uva(cpu_offload_params=["experts"]), **prefetch(offload_group_size=2)},
            ['"uva.cpu_offload_params"', "nothing would move"],
        ),
        (uva(cpu_offload_gb=1, cpu_offload_params=["a,b"]), ['"uva.cpu_offload_params"', '"a,b"']),
        (uva(cpu_offload_gb=1, cpu_offload_params=[""]), ['"uva.cpu_offload_params"', "empty"]),
        (prefetch(offload_group_size=2, offload_params=["*.mlp"]), ['"prefetch.offload_params"', "pattern"]),
    ],
)
def test_what_moves_nothing_is_refused(document: Any, texts: list[str]) -> None:
    error = refused(document)
    for text in texts:
        assert text in error.message
    assert error.hint


def test_a_config_built_by_hand_goes_through_the_same_door() -> None:
    refused(OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=float("inf"))))
    config = OffloadConfig(uva=UVAOffloadConfig(cpu_offload_gb=4), vllm_cpp={"order": "declaration"})  # type: ignore[call-arg]
    assert parse_offload_config(config) is config
    assert config.extension.order == "declaration"
    nested = parse_offload_config({"uva": UVAOffloadConfig(cpu_offload_gb=4)})
    assert nested.uva.budget_bytes == 4 * GIB


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (
            {"offload_backend": "uva", **uva(cpu_offload_gb=1), **prefetch(offload_group_size=2)},
            PREFETCH_IGNORED,
        ),
        (
            {"offload_backend": "prefetch", **uva(cpu_offload_gb=1), **prefetch(offload_group_size=2)},
            UVA_IGNORED,
        ),
        ({**uva(cpu_offload_gb=1), **prefetch(offload_group_size=2)}, BOTH_SET),
        (
            {**uva(cpu_offload_gb=1), **prefetch(offload_prefetch_step=0)},
            '"prefetch.offload_prefetch_step" is 0 but "prefetch.offload_group_size" is 0',
        ),
        (prefetch(offload_num_in_group=3), '"prefetch.offload_num_in_group" is 3'),
        (
            {"overspill": {"order": "declaration"}},
            '"overspill.order" is "declaration" but there is no uva budget',
        ),
    ],
)
def test_what_yields_is_warned_of_once(document: dict[str, Any], text: str) -> None:
    with pytest.warns(OverspillWarning) as caught:
        parse_offload_config(document)
    assert len(caught) == 1
    assert text in str(caught[0].message)


def test_what_is_at_its_default_is_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse_offload_config(prefetch(offload_prefetch_step=1, offload_num_in_group=1, offload_params=[]))


@pytest.mark.parametrize(
    ("document", "backend", "offloads"),
    [
        (uva(cpu_offload_gb=1), "uva", True),
        (prefetch(offload_group_size=4), "prefetch", True),
        ({"offload_backend": "prefetch", **prefetch(offload_group_size=4)}, "prefetch", True),
        ({"offload_backend": "uva", **uva(cpu_offload_gb=1)}, "uva", True),
        ({"overspill": {"device_fit": {"weight_budget_bytes": 1}}}, None, False),
    ],
)
def test_the_backend(document: dict[str, Any], backend: str | None, offloads: bool) -> None:
    config = parse_offload_config(json.dumps(document))
    assert (config.resolved_backend, config.offloads) == (backend, offloads)


def test_selecting_a_backend_is_not_offloading() -> None:
    config = OffloadConfig(offload_backend="uva")
    assert (config.resolved_backend, config.offloads) == ("uva", False)


@given(st.floats(0, 2**20))
def test_the_budget_is_cut_to_whole_bytes(gib: float) -> None:
    assert UVAOffloadConfig(cpu_offload_gb=gib).budget_bytes == int(gib * 1024**3)


@pytest.mark.parametrize(
    ("document", "message", "hint"),
    [
        (
            uva(cpu_offload_GB=1),
            'unknown key "uva.cpu_offload_GB" (expected one of: cpu_offload_gb cpu_offload_params)',
            'did you mean "cpu_offload_gb"?',
        ),
        (
            prefetch(x=1),
            'unknown key "prefetch.x" (expected one of: offload_group_size offload_num_in_group '
            "offload_prefetch_step offload_params)",
            'remove "x"',
        ),
        (
            {"vllm-cpp": {}},
            'unknown key "vllm-cpp" (expected one of: offload_backend uva prefetch overspill vllm_cpp)',
            'did you mean "vllm_cpp"?',
        ),
        (
            {"overspill": {"mmapp": {}}},
            'unknown key "overspill.mmapp" (expected one of: mmap expert_stream device_fit placement order)',
            'did you mean "mmap"?',
        ),
        (
            {"vllm_cpp": {"placement": {"overrides": [{"pattern": "x", "device": "cpu", "devices": 1}]}}},
            'unknown key "vllm_cpp.placement.overrides[0].devices" (expected one of: pattern device)',
            'did you mean "device"?',
        ),
    ],
)
def test_unknown_keys_list_the_valid_ones(document: dict[str, Any], message: str, hint: str) -> None:
    error = refused(document)
    assert error.message == f"offload config: {message}"
    assert error.hint == hint


def test_an_error_names_key_value_bound_and_meaning() -> None:
    error = refused(uva(cpu_offload_gb=-1))
    assert error.message == 'offload config: "uva.cpu_offload_gb" is -1: Input should be greater than or equal to 0'
    assert error.hint is not None
    assert error.hint.startswith('"uva.cpu_offload_gb": GiB of weights')


def test_every_mistake_is_told_at_once() -> None:
    error = refused({"offload_backend": "disk", "uva": {"cpu_offload_gb": -1}, "prefetch": 3})
    assert len(error.message.splitlines()) == 3
    assert 'offload config: "prefetch" must be a JSON object' in error.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"uva":\n {"cpu_offload_gb" 4}}', "malformed JSON: Expecting ':' delimiter (line 2, column 20)"),
        ("{", "malformed JSON"),
        ('{"uva": {}, "uva": {"cpu_offload_gb": 4}}', 'the key "uva" is written twice'),
        (
            '{"uva": {"cpu_offload_gb": null, "cpu_offload_gb": 4}}',
            'the key "cpu_offload_gb" is written twice',
        ),
        ('{"uva": {"cpu_offload_gb": NaN}}', "NaN is not a JSON number"),
        ('{"uva": {"cpu_offload_gb": Infinity}}', "Infinity is not a JSON number"),
        ('{"uva": {"cpu_offload_gb": %s}}' % ("9" * 5000), "malformed JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "must be a JSON object"),
        ("4", "must be a JSON object"),
        ('"uva"', "must be a JSON object"),
    ],
)
def test_malformed_documents(text: str, message: str) -> None:
    error = refused(text)
    assert error.message.startswith("offload config: ")
    assert message in error.message
    assert error.hint


@pytest.mark.parametrize("document", [4, ["uva"], b"{}"])
def test_what_is_no_document(document: Any) -> None:
    assert "must be a JSON object" in refused(document).message


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["offload_backend", "uva", "prefetch", "overspill", "cpu_offload_gb", "mmap", "x"]),
                inner,
            )
        ),
    )
)
def test_any_json_is_a_config_or_a_config_error(document: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverspillWarning)
        with suppress(ConfigError):
            assert isinstance(parse_offload_config(json.dumps(document)), OffloadConfig)


def test_a_config_survives_json_and_cannot_be_changed() -> None:
    config = parse_offload_config(
        {
            **uva(cpu_offload_gb=1.5, cpu_offload_params=["mlp", "experts"]),
            "vllm_cpp": {"order": "declaration"},
        }
    )
    text = config.model_dump_json(exclude_unset=True)
    assert parse_offload_config(text) == config
    assert '["experts","mlp"]' in text
    with pytest.raises(ValidationError):
        config.offload_backend = "uva"
    with pytest.raises(ValidationError):
        PrefetchOffloadConfig().offload_group_size = 2
