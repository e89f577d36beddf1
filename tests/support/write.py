"""`make support`: runs every architecture, and writes what was found into the package and into docs/support.md."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch  # noqa: E402

from architectures import KINDS  # noqa: E402
from matrix import row_of  # noqa: E402
from overspill.support import Matrix, Row, as_markdown, save_matrix  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs" / "support.md"


def found(kind: str) -> Row:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return row_of(kind, Path(folder))


def main() -> None:
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        rows = []
        for kind, row in zip(KINDS, pool.map(found, KINDS), strict=True):
            print(f"{kind}: {', '.join(row.backends) or row.reason}", file=sys.stderr)
            rows.append(row)
    matrix = Matrix({"transformers": version("transformers")}, tuple(rows))
    save_matrix(matrix)
    DOCS.write_text(as_markdown(matrix))


if __name__ == "__main__":
    main()
