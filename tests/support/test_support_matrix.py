"""The support matrix is what is found, and docs/support.md is what it says."""

from __future__ import annotations

import importlib.util
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

from architectures import CAUSAL, KINDS, tiny
from matrix import row_of
from overspill.support import BACKENDS, Row, as_markdown, counts, load_matrix

same_transformers = pytest.mark.skipif(
    version("transformers") != load_matrix().versions["transformers"],
    reason=f"the matrix is of transformers {load_matrix().versions['transformers']}",
)


def committed(kind: str) -> Row | None:
    found = tiny(kind)
    wanted = (found.architecture, found.model_type)
    return next((row for row in load_matrix().rows if (row.architecture, row.model_type) == wanted), None)


@same_transformers
@pytest.mark.parametrize("kind", KINDS)
def test_an_architecture_runs_as_its_row_says(kind: str, tmp_path: Path) -> None:
    if kind == "gemma3n" and importlib.util.find_spec("timm") is not None:
        pytest.skip("the row is of a machine without timm")
    assert row_of(kind, tmp_path) == committed(kind), "`make support` writes the matrix anew, if this is right"


@same_transformers
def test_every_causal_language_model_of_transformers_has_a_row_and_nothing_else() -> None:
    rows = Counter((row.architecture, row.model_type) for row in load_matrix().rows)
    assert rows == Counter((tiny(kind).architecture, tiny(kind).model_type) for kind in KINDS)
    # Gemma 3 has a row with a picture, which is its entry of the mapping too.
    assert {(name, kind) for kind, name in CAUSAL.items()} - {*rows} == set()


def test_fewer_than_ten_are_refused_each_with_its_reason() -> None:
    refused = [row for row in load_matrix().rows if row.status == "refused"]
    assert len(refused) < 10
    assert all(row.reason and not row.backends for row in refused)
    assert all(row.reason is None and row.backends for row in load_matrix().rows if row not in refused)


def test_the_tiny_models_have_everything_that_matters() -> None:
    rows = load_matrix().rows
    features = Counter(feature for row in rows for feature in row.features)
    least = {
        "tied embeddings": 20, "biases": 20, "grouped heads": 50, "latent attention": 10, "sliding window": 15,
        "linear attention or state space": 15, "embeddings by layer": 3, "routed experts": 50, "shared experts": 20,
        "towers": 4, "layers run in rounds": 2, "a picture": 3, "sound": 1,
    }  # fmt: skip
    assert {name: features[name] for name in least} == {name: max(n, features[name]) for name, n in least.items()}
    assert counts(rows)["supported"] - features["tied embeddings"] > 50


def test_every_supported_architecture_has_uva_and_a_backend_that_it_lacks_is_named() -> None:
    for row in load_matrix().rows:
        if row.status == "supported":
            experts = "routed experts" in row.features
            named = {*BACKENDS} if experts else {*BACKENDS} - {"placement", "expert_stream"}
            assert {*row.backends} | {*row.limits} == named, row.architecture
            assert not {*row.backends} & {*row.limits}
            assert "uva" in row.backends


def test_the_page_is_made_of_the_matrix() -> None:
    page = Path(__file__).parents[2] / "docs" / "support.md"
    assert page.read_text() == as_markdown(load_matrix()), "`make support` writes it"
