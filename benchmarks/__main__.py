"""`python -m benchmarks [load|step|cuda]`: all of them without a name."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="load|step|cuda", help="which; load and step without a name")
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer rounds; figures are rough")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write each benchmark's JSON and Markdown there")
    parser.add_argument("--json", action="store_true", help="JSON on stdout instead of tables")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where random checkpoints are kept")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the demo model, where examples/ is not to fetch it")
    arguments = parser.parse_args()
    return 0


if __name__ == "__main__":
    sys.exit(main())
