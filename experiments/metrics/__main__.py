"""`python -m experiments.metrics` writes docs/metrics.md; `--check` fails when the file is not up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.metrics.document import render

PATH = Path(__file__).parents[2] / "docs" / "metrics.md"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 written or up to date, 1 out of date under `--check`."""
    parser = argparse.ArgumentParser(prog="python -m experiments.metrics", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    text = render()
    if parser.parse_args(arguments).check:
        if PATH.is_file() and PATH.read_text(encoding="utf-8") == text:
            return 0
        sys.stderr.write("docs/metrics.md differs from the registry: run `python -m experiments.metrics`\n")
        return 1
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
