"""`headrace check`: run golden cases against this build."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

# Exit code of the command line when a check ran and failed.
CHECK_FAILED = 1


def command(
    directories: Annotated[list[Path], Parameter(name="DIR")],
    /,
    *,
    json_lines: Annotated[bool, Parameter(name="--json", negative="")] = False,
    quick: Annotated[bool, Parameter(negative="")] = False,
    device: str = "cpu",
) -> int:
    """Check golden cases: one line a check with the measured error and its gate.

    Exits 1 if any check fails. The cases of this project lie packed in tests/golden; unpack them
    with `python scripts/pack_golden.py unpack DIR`.

    Parameters
    ----------
    directories
        Case directories (config.json, model.safetensors, inputs.npz, expected.npz).
    json_lines
        Print one JSON object a check instead of text.
    quick
        Leave out the chunking plans, which take most of the time.
    device
        Where to compute: cpu, cuda or cuda:N.
    """
    from headrace.check.case import GoldenCase
    from headrace.check.model import check_case
    from headrace.platforms import platform_for

    platform = platform_for(device)
    cases = [GoldenCase.open(Path(d), platform) for d in directories]
    failed = total = 0
    for case in cases:
        for result in check_case(case, quick=quick, started=_say(case.name, json_lines)):
            total += 1
            failed += not result.passed
            if json_lines:
                print(json.dumps(result.as_dict()), flush=True)
            else:
                sign = ">=" if result.at_least else "<="
                word = "ok  " if result.passed else "FAIL"
                print(
                    f"{word} {result.case:<12} {result.check:<40} "
                    f"{result.error:.3g} {sign} {result.gate:g}",
                    flush=True,
                )
    if not json_lines:
        print(f"{total} checks, {failed} failed")
    return CHECK_FAILED if failed else 0


def _say(case: str, quiet: bool) -> Callable[[str], None]:
    """Shows on a terminal which group of checks runs."""

    def started(group: str) -> None:
        if sys.stderr.isatty() and not quiet:
            print(f"\r{case}: {group} ...\033[K", end="\r", file=sys.stderr, flush=True)

    return started
