"""Logs of any kind are read: cut, damaged, huge, in other encodings, or no log at all."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from pathlib import Path

import pytest
from audit_logs import LOGS, audit_text, audited, ids, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.audit import VLLM_PARTS, audit_log, llama_findings, llama_log, summary, vllm_log
from overspill.audit.lines import LONGEST_LINE, lines_of, opened
from overspill.audit.records import KEPT_HITS, Line
from overspill.audit.scan import scan
from overspill.audit.sources import unwrapped
from overspill.errors import CheckpointError

ENGINES = (vllm_log.ENGINE, llama_log.ENGINE)
LITERALS = [row.literal for engine in ENGINES for row in engine.table]


@pytest.mark.parametrize("content", [b"", b"\n\n", bytes(range(256)) * 500, b"\x00" * 5000, b"hello\nworld\n"])
def test_what_is_no_log_is_not_called_healthy(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "some.log"
    path.write_bytes(content)
    (audit,) = audit_log(str(path))
    assert audit.engine is None
    assert ids(audit) == {"nothing-to-judge": "warning"}


@pytest.mark.parametrize("name", ["vllm-healthy", "llama-healthy-cpu-moe", "vllm-four-ranks"])
def test_a_log_cut_anywhere_is_judged_without_failing(name: str, tmp_path: Path) -> None:
    text = text_of(name)
    loaded = min(text.find(word) for word in ("Model loading took", "model buffer size") if word in text)
    for end in range(0, len(text), 97):
        audit = audit_text(text[:end], tmp_path)
        if end < loaded:
            assert audit.wrong, "a log that ends before the model was loaded is no healthy one"


def test_utf_16_as_powershell_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "utf16.log"
    path.write_bytes(text_of("llama-mmap-experts").encode("utf-16"))
    (audit,) = audit_log(str(path))
    assert ids(audit) == ids(audited("llama-mmap-experts"))


def test_windows_line_ends_and_prefixes_of_container_logs(tmp_path: Path) -> None:
    plain = audited("vllm-tower-rounded")
    changed = audit_text(text_of("vllm-tower-rounded").replace("\n", "\r\n"), tmp_path)
    assert [(one.id, [line.number for line in one.evidence]) for one in changed.findings] == [
        (one.id, [line.number for line in one.evidence]) for one in plain.findings
    ]
    rows = text_of("vllm-tower-rounded").split("\n")
    stamped = "".join(f"2026-11-12T08:30:00.123456789Z stdout F {row}\n" for row in rows)
    assert ids(audit_text(stamped, tmp_path)) == ids(plain)


def test_a_progress_bar_in_front_of_a_line_does_not_hide_it(tmp_path: Path) -> None:
    path = tmp_path / "bar.log"
    path.write_bytes(b"one\nloading  10%\rloading 100%\rTotal \x1b[32mCPU\x1b[0m offloaded parameters: 3.0\nlast")
    with opened(str(path)) as text:
        assert list(lines_of(text)) == [
            Line(1, "one"),
            Line(2, "loading  10%"),
            Line(2, "loading 100%"),
            Line(2, "Total CPU offloaded parameters: 3.0"),
            Line(3, "last"),
        ]


def test_memory_stays_constant(tmp_path: Path) -> None:
    path = tmp_path / "large.log"
    with path.open("w") as file:
        file.write("x" * (16 * LONGEST_LINE * 8) + "\n")
        row = "(Worker_TP{} pid=1) INFO [uva.py:65] Total CPU offloaded parameters: 1.5\n"
        file.writelines(row.format(number) for number in range(20_000))
    assert path.stat().st_size > 9_000_000
    tracemalloc.start()
    try:
        (audit,) = audit_log(str(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert audit.happened["ranks"] == KEPT_HITS
    assert peak < 5_000_000


@pytest.mark.parametrize("filler", [*"a (=,1|_.", " -", "'{", "llama-server ", "vllm serve "])
def test_no_line_takes_for_ever(filler: str) -> None:
    begun = time.monotonic()
    for literal in (*LITERALS, "--cpu-offload-params ", "-ot ", "'cpu_offload_params': {", "model=", ""):
        long = filler * (LONGEST_LINE // 4 // len(filler))
        scan([Line(1, literal + long), Line(2, long + literal)], ENGINES)
        unwrapped(literal + long)
        unwrapped(long + literal)
    assert time.monotonic() - begun < 30


_FRAGMENTS = st.sampled_from(
    [
        *LITERALS,
        *(line for path in sorted(LOGS.iterdir()) for line in path.read_text().split("\n")[::3]),
        *(
            "nan",
            "inf",
            "1.2.3",
            "1e999",
            "-1",
            "0",
            "٣",
            "(Worker_TP0 pid=3)",
            "\r",
            "\x1b[1m",
            "{",
            "' ",
            "=CPU,",
            " GiB",
        ),
        *("vllm serve m --cpu-offload-gb 1e308 -tp 0", "llama-server -ot '[=CPU' -ncmoe 9"),
    ]
)
_LINE = st.lists(st.one_of(_FRAGMENTS, st.text(max_size=20)), max_size=5).map("".join)


@settings(max_examples=300)
@given(lines=st.lists(_LINE, max_size=12), engine=st.sampled_from(ENGINES))
def test_no_line_makes_it_fail(lines: list[str], engine: object) -> None:
    rows = [Line(number, text) for number, text in enumerate(lines, 1)]
    for found in scan(rows, [engine]):  # type: ignore[list-item]
        facts, is_vllm = found.facts, engine is vllm_log.ENGINE
        for part in VLLM_PARTS if is_vllm else (llama_findings,):
            assert all(finding.why and finding.remedy for finding in part.findings(facts))
        told = (summary.vllm, summary.vllm_unjudged) if is_vllm else (summary.llama, summary.llama_unjudged)
        assert all(tell(facts) is not None for tell in told)


@settings(max_examples=100)
@given(content=st.binary(max_size=3000))
def test_no_bytes_make_it_fail(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "binary.log"
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):  # it begins as a compressed one does
        assert all(audit.wrong for audit in audit_log(str(path)))
