"""`python -m benchmarks [NAME...]` of the names below; without one all, cuda where a GPU is."""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
from examples.demo_model import demo_model_path

from benchmarks import crowd, cuda, disk, experts, forecast, kernels, load, scale, serve, step
from benchmarks.report import Report, console

NAMES = ("load", "step", "kernels", "experts", "disk", "serve", "crowd", "forecast", "scale", "cuda")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.replace("`", ""))
    parser.add_argument("names", nargs="*", metavar="|".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer rounds; the figures are rough")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write Markdown and JSON there")
    parser.add_argument("--json", action="store_true", help="JSON on stdout instead of tables")
    parser.add_argument(
        "--cache", type=Path, default=Path("~/.cache/overspill"), metavar="DIR", help="where models are kept"
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the demo model, if it is not to be fetched")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(NAMES):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(NAMES)}")
    size = "quick" if given.quick else "full"
    status = 0
    for name in given.names or (NAMES if torch.cuda.is_available() else NAMES[:-1]):
        if name == "cuda":
            output = ["--output", str(given.output)] if given.output else []
            emulated = [] if torch.cuda.is_available() else ["--device", "emulated"]
            status |= cuda.main([*output, *emulated, *(["--quick"] if given.quick else [])])
        elif name == "load":
            show(measure_load(size, given.cache.expanduser(), given.gguf), given)
        elif name == "kernels":
            show(kernels.measure(size, tell), given)
        elif name == "experts":
            show(experts.measure(experts.SCALES[size], given.cache.expanduser() / "benchmarks", tell), given)
        elif name == "disk":
            show(disk.measure(disk.SCALES[size], given.cache.expanduser() / "benchmarks", tell), given)
        elif name == "forecast":
            show(forecast.measure(forecast.SCALES[size], given.cache.expanduser() / "benchmarks", tell), given)
        elif name == "scale":
            show(scale.measure(scale.SCALES[size], given.cache.expanduser() / "benchmarks", tell), given)
        elif name == "serve":
            model = given.gguf or demo_model_path(given.cache)
            show(serve.measure(model, serve.SCALES[size], tell), given)
        elif name == "crowd":
            show(crowd.measure(given.gguf or demo_model_path(given.cache), size, tell), given)
        else:
            show(step.measure(step.SCALES[size], tell), given)
    return status


def measure_load(size: str, cache: Path, gguf: Path | None) -> Report:
    return load.measure(
        load.cases(cache / "benchmarks", gguf or demo_model_path(cache), size), 1 if size == "quick" else 3, tell
    )


def show(report: Report, given: argparse.Namespace) -> None:
    if given.json:
        print(json.dumps(report.as_json()))
    else:
        console().print(report.render())
    if given.output is not None:
        for path in report.write(given.output, f"{report.name}-{datetime.now(UTC):%Y-%m-%d}"):
            tell(f"written: {path}")


def tell(text: str) -> None:
    """Progress goes to stderr, results to stdout."""
    console(stderr=True).print(text, style="dim", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
