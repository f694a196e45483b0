"""`python -m analysis COMMAND`: what runs show, from their files. Exit codes: 0 done, 2 bad input."""

from __future__ import annotations

import argparse
import sys

from analysis import merge_error
from analysis.report import command as report


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 unusable input, said on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    report.add_command(commands)
    merge_error.add_command(commands)
    parsed = parser.parse_args(arguments)
    try:
        parsed.run(parsed)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
