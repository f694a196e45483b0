"""`python -m strategies list` prints the strategies; `python -m strategies check TARGET` tests one against cases.

Exit codes: 0 ok, 1 a case fails, 2 bad usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from strategies.case_file import CASES_DIR, Case, load_cases
from strategies.conformance import CaseResult, run_case
from strategies.targets import TargetError, all_configs, build, find, load_class, parse_value

COLUMNS = ("name", "class", "views", "rows", "loss", "exact when")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of one command."""
    parser = argparse.ArgumentParser(prog="python -m strategies", description="Routing-merge strategies.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print the strategies of conf/strategy")
    check = commands.add_parser("check", help="test a strategy against the conformance cases")
    check.add_argument("target", help="name of a YAML in conf/strategy, package.module.Class or package.module:Class")
    check.add_argument("arguments", nargs="*", metavar="key=value", help="constructor arguments")
    check.add_argument("--cases", type=Path, help="a file of cases in place of the built-in ones")
    check.add_argument(
        "--as", dest="rule", metavar="RULE", help="expectations to meet, e.g. replace (default: by name)"
    )
    args = parser.parse_args(argv)
    try:
        if args.command == "list":
            return print_table()
        return check_target(args.target, args.arguments, args.cases, args.rule)
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def print_table() -> int:
    """Prints every strategy found in conf/strategy: where its rows come from, what carries loss, when it is exact."""
    table: list[tuple[str, ...]] = [COLUMNS]
    for config in all_configs():
        cls = load_class(config.target)
        views = "one" if cls.single_view else "one per segment"
        facts = [config.summary.get(key, "-").strip() for key in COLUMNS[3:]]
        table.append((config.name, cls.__name__, views, *facts))
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def check_target(target: str, arguments: Sequence[str], path: Path | None, rule: str | None) -> int:
    """Prints which cases a strategy fails, and at which positions; returns 1 when there are any.

    Raises:
        TargetError: the target, an argument, the rule or the file of cases is no good.
    """
    name, class_path, configured = find(target)
    strategy = build(class_path, {**configured, **dict(map(_key_value, arguments))})
    cases = _cases(path)
    if rule is not None and not any(rule in case.expect for case in cases):
        known = sorted({key for case in cases for key in case.expect} - {"error"})
        raise TargetError(f"--as {rule}: no case has expectations for it; known are {', '.join(known)}")
    if rule is None:
        rule = name if any(name in case.expect for case in cases) else None
    results = [run_case(case, strategy, rule) for case in cases]
    _report(results)
    failed = sum(bool(result.failures) for result in results)
    refused = sum(result.refused is not None and not result.failures for result in results)
    held = f"the expectations of {rule} and the contract" if rule else "the contract"
    print(
        f"{target}: {len(cases)} cases against {held}: {len(cases) - failed - refused} passed, "
        f"{failed} failed, {refused} refused"
    )
    return 1 if failed else 0


def _key_value(argument: str) -> tuple[str, object]:
    """Returns the two sides of a `key=value` argument."""
    key, equals, value = argument.partition("=")
    if not equals or not key.isidentifier():
        raise TargetError(f"argument {argument!r}: key=value expected")
    return key, parse_value(value)


def _cases(path: Path | None) -> list[Case]:
    """Returns the cases of a file, or of all files that ship with the package."""
    try:
        return [case for file in ([path] if path else sorted(CASES_DIR.glob("*.json"))) for case in load_cases(file)]
    except (OSError, ValueError) as error:
        raise TargetError(f"cases: {error}") from error


def _report(results: Sequence[CaseResult]) -> None:
    """Prints a line for every failure, refusal and warning."""
    for result in results:
        for text in result.failures:
            print(f"FAIL     {result.case}: {text}")
        if result.refused is not None:
            print(f"refused  {result.case}: {result.refused}")
        for text in result.warnings:
            print(f"warning  {result.case}: {text}")


if __name__ == "__main__":
    sys.exit(main())
