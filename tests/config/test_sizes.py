from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.config import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_gib,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
)
from overspill.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("2GiB", 2 * GIB),
        ("512 MiB", 512 * MIB),
        (" 1.5KiB ", 1536),
        ("1TiB", TIB),
        ("16GB", 16 * 10**9),
        ("16gb", 16 * 10**9),
        ("2gib", 2 * GIB),
        ("7MB", 7 * 10**6),
        ("3KB", 3000),
        ("1TB", 10**12),
        ("12B", 12),
        ("1024", 1024),
        (".5GiB", GIB // 2),
        ("0", 0),
        (4096, 4096),
        (2.9, 2),
    ],
)
def test_bytes(text: str | float, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


def test_bare_numbers_take_the_given_unit() -> None:
    assert parse_bytes("1.5", bare="GiB") == 3 * GIB // 2
    assert parse_bytes(2, bare="GiB") == 2 * GIB
    assert parse_bytes("2MiB", bare="GiB") == 2 * MIB


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "GiB",
        "-1",
        "-1GiB",
        "nan",
        "inf",
        "1e9",
        "1,5GiB",
        "9" * 5000,
        float("nan"),
        float("inf"),
        -1,
        True,
    ],
)
def test_bytes_refuses_what_is_no_size(bad: str | float) -> None:
    with pytest.raises(ConfigError, match=r'"device_memory" is .*which is not a size') as caught:
        parse_bytes(bad, field="device_memory")
    assert caught.value.hint is not None
    assert "2GiB" in caught.value.hint


@pytest.mark.parametrize("unit", ["Gb", "G", "Gi", "gigabytes", "GiB/s"])
def test_bytes_refuses_units_that_are_none(unit: str) -> None:
    with pytest.raises(ConfigError, match=f'"{unit}" is not a unit of bytes'):
        parse_bytes(f"16{unit}")


def test_less_than_a_byte_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than one byte"):
        parse_bytes("0.0000000001GiB")


@given(st.integers(0, 2**40), st.sampled_from([("KiB", KIB), ("MiB", MIB), ("GB", 10**9), ("B", 1), ("", 1)]))
def test_whole_sizes_are_exact(count: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{count}{unit[0]}") == count * unit[1]


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    for parse in (parse_bytes, parse_bandwidth, parse_duration):
        with suppress(ConfigError):
            assert parse(text) >= 0


def test_bandwidth() -> None:
    assert parse_bandwidth("16GB/s") == 16e9
    assert parse_bandwidth("1.5 GiB/s") == 1.5 * GIB
    assert parse_bandwidth(2e9) == 2e9


@pytest.mark.parametrize("bad", ["16", "16GB", "16Gb/s", "0GB/s", "inf", 0, -1.0, float("inf"), True])
def test_bandwidth_refuses(bad: str | float) -> None:
    with pytest.raises(ConfigError, match='"link_bandwidth" is'):
        parse_bandwidth(bad, field="link_bandwidth")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10us", 1e-5), ("10µs", 1e-5), ("1ms", 1e-3), ("0.5s", 0.5), ("3ns", 3e-9), (0, 0), (0.25, 0.25)],
)
def test_duration(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("bad", ["10", "1min", "-1ms", "nan", float("nan"), False])
def test_duration_refuses(bad: str | float) -> None:
    with pytest.raises(ConfigError, match='"link_latency" is'):
        parse_duration(bad, field="link_latency")


def test_gib_is_printed_as_vllm_prints_it() -> None:
    assert format_gib(int(8.02 * GIB)) == "8.02"
    assert format_gib(8 * GIB) == "8.0"
    assert format_gib(1000) == "0.0"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (512 * MIB, "512.00 MiB"),
        (9 * GIB // 2, "4.50 GiB"),
        (-MIB, "-1.00 MiB"),
    ],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text
