from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from io import StringIO

import pytest
from made_results import EQUAL, LAYERS, MIB, evidence, from_disk, generation, mapped, placed, run, streamed
from rich.console import Console

from overspill.compare.answers import AnswerDifference
from overspill.compare.drawing import forecast_chart, layer_rows, step_chart
from overspill.compare.page import render_page
from overspill.compare.report import SCHEMA, Report, SideReport, conditions
from overspill.compare.results import Allocation, PassTime, RunResult, TimeForecast
from overspill.compare.tables import memory_rows
from overspill.compare.terminal import render_terminal
from overspill.compare.verdicts import Evidence, judge


def report_of(found: Evidence, *, model: str = "a/model", prompts: tuple[str, ...] = ("Why?",)) -> Report:
    def side(name: str, runs, apart) -> SideReport:
        return SideReport(name, {}, {"device": "emulated"}, runs, apart)

    return Report(
        model=model,
        architecture="LlamaForCausalLM",
        prompts=prompts,
        verdicts=judge(found),
        baseline=side("baseline", found.baseline, found.baseline_differences) if found.baseline else None,
        candidate=side("candidate", found.candidate, found.candidate_differences),
        baseline_missing=found.baseline_missing,
        notes=("a note",),
        conditions=conditions(found.candidate[0], repeat=len(found.candidate), max_tokens=3),
    )


def shown(report: Report) -> str:
    output = StringIO()
    Console(file=output, width=100, no_color=True).print(render_terminal(report))
    return output.getvalue()


MISSING = evidence(baseline=(), baseline_differences=(), baseline_missing="the baseline does not fit: too large")
BROKEN = evidence(candidate_differences=((AnswerDifference(1, 2, math.nan, 1, math.nan),), (EQUAL,)))


PLACED = evidence(baseline=(streamed(),) * 2, candidate=(placed(),) * 2)
STREAMED = evidence(candidate=(streamed(),) * 2)


@pytest.mark.parametrize("found", [evidence(), evidence("prefetch"), MISSING, BROKEN, PLACED, STREAMED])
def test_json_and_page_hold_every_verdict_and_its_grounds(found, tmp_path):
    report = report_of(found).write(tmp_path / "made" / "here")
    assert [path.name for path in report.files] == ["report.json", "report.html"]
    written = json.loads(report.files[0].read_text())
    page = report.files[1].read_text()
    assert written["schema"] == SCHEMA
    assert written["failed"] == [v.name for v in report.failed]
    for verdict, told in zip(report.verdicts, written["verdicts"], strict=True):
        assert (told["name"], told["outcome"], told["reason"]) == (verdict.name, verdict.outcome, verdict.reason)
        assert [check["text"] for check in told["checks"]] == [check.text for check in verdict.checks]
        for check in verdict.checks:
            assert check.text.replace("'", "&#39;") in page
    assert len(written["candidate"]["runs"]) == len(found.candidate)
    assert (written["baseline"] is None) == (not found.baseline)


def test_a_number_that_json_has_no_word_for_is_named():
    told = report_of(BROKEN).as_json()
    assert told["candidate"]["differences"][0][0]["largest"] == "nan"
    json.dumps(told, allow_nan=False)


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing():
    page = render_page(report_of(evidence()))
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(|\son\w+=", page)


def test_what_others_wrote_is_shown_and_not_run():
    prompt, model = "<script>alert(1)</script>", "<b>model</b>"
    text = replace(generation(), text="<i>answer</i>")
    found = evidence(candidate=(run("zero_copy", generations=(text,)),) * 2)
    page = render_page(report_of(found, model=model, prompts=(prompt,)))
    for hostile in (prompt, model, "<i>answer</i>"):
        assert hostile not in page
        assert hostile.replace("<", "&lt;").replace(">", "&gt;") in page


def test_tokens_that_differ_are_marked():
    other = run("zero_copy", generations=(generation(ids=(11, 99, 13)),))
    apart = ((AnswerDifference(1, 2, 0.5, 1, 0.1),),) * 2
    page = render_page(report_of(evidence(candidate=(other,) * 2, candidate_differences=apart)))
    assert "<mark>99</mark>" in page
    assert "<mark>12</mark>" in page
    assert "<mark>13</mark>" not in page
    assert "token 2 differs" in page


def test_every_layer_has_a_bar_of_its_bytes():
    rows = layer_rows(run("zero_copy").weights)
    assert [row.label for row in rows] == ["embed_tokens", *(f"layer {i}" for i in range(LAYERS))]
    assert [[part.access for part in row.segments] for row in rows] == [["resident"]] * 3 + [["zero_copy"]] * 2
    assert [row.segments[0].percent for row in rows] == [100.0] * 5
    assert [row.cut for row in rows] == [True, False, False, False, False]  # the embedding is twice a layer
    assert sum(row.bytes for row in rows) == 60 * MIB


def test_the_chart_draws_every_decode_step_within_its_frame():
    chart = step_chart(report_of(evidence()))
    assert chart is not None
    assert [line.side for line in chart.lines] == ["baseline", "candidate"]
    for line in chart.lines:
        points = [tuple(map(float, point.split(","))) for point in line.points.split()]
        assert len(points) == line.steps == 2
        assert all(chart.left <= x <= chart.right and chart.top <= y <= chart.bottom for x, y in points)
        assert points[0][1] > points[1][1]  # the second step is the slower one: higher up
    assert chart.floor is not None
    short = evidence(candidate=(run("zero_copy", generations=(generation(ids=(4,)),)),), baseline=())
    assert step_chart(report_of(replace(short, baseline_missing="no"))) is None


def with_times(result: RunResult, *step_ms: float) -> RunResult:
    """The first of `step_ms` is of a step of one sequence, the others double their number each."""
    batches = tuple(PassTime(2**i, ms / 1e3, "link" if i < 2 else "device compute") for i, ms in enumerate(step_ms))
    return replace(result, plan=replace(result.plan, times=TimeForecast("made up", step_ms[0] / 1e3, batches)))


def test_the_forecast_is_drawn_by_batch_and_held_against_what_was_measured():
    """Decode steps take 21 and 22 ms."""
    report = report_of(
        evidence(
            baseline=(with_times(run(), 10, 10, 10, 20),), candidate=(with_times(run("zero_copy"), 43, 44, 46, 80),)
        )
    )
    chart = forecast_chart(report)
    assert chart is not None
    assert [curve.side for curve in chart.curves] == ["baseline", "candidate"]
    for curve in chart.curves:
        heights = [mark.y for mark in curve.marks]
        assert heights[0] > heights[1] > heights[2] >= heights[3], "tokens a second grow with the batch"
        assert all(chart.left <= mark.x <= chart.right and 0 <= mark.y <= chart.bottom for mark in curve.marks)
    baseline, candidate = (curve.marks for curve in chart.curves)
    assert all(fast.y < slow.y for fast, slow in zip(baseline, candidate, strict=True)), "the faster is higher up"
    assert candidate[3].title == "8 sequences: 80.0 ms a step, 100.0 tokens/s, limited by device compute"
    assert [tick.label for tick in chart.x_ticks] == ["1", "2", "4", "8"]
    page = render_page(report)
    assert candidate[3].title in page
    for told in ("10.0 ms, measured 2.15 times that", "43.0 ms, measured 0.50 times that"):
        assert told in page
        assert told in shown(report).replace("\n", " ")


def test_without_rates_nothing_is_forecast_and_the_page_says_so():
    assert forecast_chart(report_of(evidence())) is None
    assert "<code>overspill bench</code> measures this machine" in render_page(report_of(evidence()))
    assert "decode step, forecast" not in shown(report_of(evidence()))


def test_memory_is_told_as_forecast_asked_allocated_and_measured():
    rows = {row.purpose: row for row in memory_rows([run("prefetch")])}
    assert list(rows) == ["weights", "buffer pool", "KV cache", "working memory", "device, in all", "host"]
    assert (rows["weights"].asked, rows["weights"].measured) == (40 * MIB, 40 * MIB)
    assert (rows["working memory"].forecast, rows["working memory"].measured) == (2 * MIB, 2 * MIB)
    assert rows["device, in all"].error == pytest.approx(0.0)
    assert rows["host"].measured is None
    assert "buffer pool" not in {row.purpose for row in memory_rows([run("zero_copy")])}


def test_routed_experts_are_told_on_the_page_and_in_the_terminal():
    report = report_of(PLACED)
    page, text = render_page(report), shown(report)
    for told in ("62.5% of 16", "4, 2, 0", "4: 2, 0", "10.00 MiB", "12, 20.00 MiB"):
        assert told in page, told
        assert told in text, told
    assert '<i class="in_place"' in page
    assert re.search(r"host, in-place\s+2\s+20\.00 MiB", text)
    assert "Routed experts" in page
    assert "Routed experts" not in render_page(report_of(evidence()))


def test_what_a_step_reads_from_disk_is_told_where_there_is_any():
    report = report_of(evidence(candidate=(from_disk(),) * 2))
    for told in (shown(report), render_page(report)):
        assert "read from disk a step" in told
        assert "20.01 MiB" in told
    quiet = report_of(evidence())
    assert "read from disk a step" not in shown(quiet) + render_page(quiet)


def test_mapped_files_have_a_row_of_memory():
    (row,) = (row for row in memory_rows([mapped()]) if row.purpose == "mapped files")
    assert row.forecast == row.measured == 60 * MIB
    assert not any(row.purpose == "mapped files" for row in memory_rows([run()]))


def test_expert_slots_and_staging_have_rows_of_memory():
    made = streamed()
    plan = replace(made.plan, staging_bytes=3 * MIB)
    staging = Allocation("staging", "host", 3 * MIB, 3 * MIB, False)
    rows = {row.purpose: row for row in memory_rows([replace(made, plan=plan, blocks=(*made.blocks, staging))])}
    slots = rows["expert slots"]
    assert (slots.forecast, slots.asked, slots.allocated, slots.measured) == (5 * MIB,) * 4
    assert rows["staging"].forecast == rows["staging"].allocated == 3 * MIB
    assert {"expert slots", "staging"}.isdisjoint(row.purpose for row in memory_rows([run("zero_copy")]))


def test_answers_that_differ_are_no_failure_where_other_kernels_compute():
    other = AnswerDifference(1, 2, 0.5, 1, 1e-3)
    for found, badge in ((PLACED, "open"), (STREAMED, "fail")):
        page = render_page(report_of(replace(found, candidate_differences=((other,),) * 2)))
        assert f'<span class="badge {badge}">token 2 differs' in page


@pytest.mark.parametrize("found", [evidence(), MISSING])
def test_the_terminal_tells_the_ledger_the_figures_and_the_verdicts(found):
    text = shown(report_of(found))
    assert re.search(r"host, zero-copy\s+2\s+20\.00 MiB", text)
    assert re.search(r"decode step\s+\S+( ms)?\s+21\.5 ms", text)
    for verdict in report_of(found).verdicts:
        assert re.search(rf"{verdict.outcome}\s+{verdict.name}", text)
    assert "note: a note" in text
