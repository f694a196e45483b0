"""Diagnosis: `python -m experiments.engines.sglang check FILE...` and `... probe URL`. Exit codes: 0 all is well, 1 a
reply or a server is not to be trusted, 2 the command cannot be carried out.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.check import is_http_url
from experiments.engines.sglang.audit import WrongCheckpoint
from experiments.engines.sglang.probe import Probe
from experiments.engines.sglang.recorded import UnreadableFile, check_file
from strategies.reply import RowShape


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of a command line."""
    options = _parser().parse_args(arguments)
    if options.checkpoint is not None and not (options.checkpoint / "config.json").is_file():
        print(f"error: no Hugging Face checkpoint in {options.checkpoint}", file=sys.stderr)
        return 2
    if options.command == "check":
        return _check(options.files, options.checkpoint)
    if not is_http_url(options.url):
        print(f"error: http(s)://HOST:PORT expected, {options.url} came", file=sys.stderr)
        return 2
    sizes = (options.layers, options.top_k, options.experts)
    if any(sizes) and not all(sizes):
        print("error: give --layers, --top-k and --experts together", file=sys.stderr)
        return 2
    shape = RowShape(*sizes) if all(sizes) else None
    return asyncio.run(_probe(Probe(options.url, options.checkpoint, shape, options.pauses, options.timeout_s)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.engines.sglang", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="what recorded replies hold, or why they are refused")
    check.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON with request, response and model")
    probe = commands.add_parser("probe", help="does a running server honour the contract?")
    probe.add_argument("url", metavar="URL")
    probe.add_argument("--pauses", action="store_true", help="try the pause modes, which hit everybody's requests")
    probe.add_argument("--layers", type=int, help="transformer layers of the model")
    probe.add_argument("--top-k", type=int, help="experts per token")
    probe.add_argument("--experts", type=int, help="routed experts")
    probe.add_argument("--timeout-s", type=float, default=120.0, help="of one request (default: %(default)s)")
    for command in (check, probe):
        command.add_argument(
            "--checkpoint", type=Path, metavar="DIR", help="compare rows and log-probs with this model"
        )
    return parser


def _check(files: Sequence[Path], checkpoint: Path | None) -> int:
    good = True
    for path in files:
        try:
            valid, line = check_file(path, checkpoint)
        except (UnreadableFile, WrongCheckpoint) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(line)
        good &= valid
    return 0 if good else 1


async def _probe(probe: Probe) -> int:
    failed = False
    async for finding in probe.run():
        print(f"{finding.mark:5}{finding.text}", flush=True)
        failed |= finding.mark == "FAIL"
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
