"""`headrace ops`: which implementation of each operator an engine would use, and why."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from cyclopts import Parameter


def command(
    *,
    dtype: Literal["float64", "float32", "bfloat16"] = "float32",
    platform: Literal["cpu", "cuda"] = "cpu",
    batch_invariant: Annotated[bool, Parameter(negative="")] = False,
    json_lines: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Print operator -> implementation -> why not the others, as an engine would resolve them.

    Parameters
    ----------
    dtype
        Compute dtype of the engine.
    platform
        Machine of the engine; it need not be this one.
    batch_invariant
        Ask for implementations whose rows are bit-equal in every batch.
    json_lines
        Print one JSON object an operator instead of text.
    """
    from headrace.ops.catalogue import IMPLEMENTATIONS
    from headrace.ops.numerics import Numerics
    from headrace.ops.registry import explain

    if not json_lines:
        print(f"{'OPERATOR':<20} {'USES':<16} OTHERS")
    numerics = Numerics(dtype=dtype, batch_invariant=batch_invariant)
    for found in explain(IMPLEMENTATIONS, platform, numerics):
        others = {impl.name: why for impl, why in found.rejected}
        if json_lines:
            print(json.dumps({"op": found.op, "chosen": found.chosen.name, "others": others}))
            continue
        reasons = "; ".join(f"{name}: {why}" for name, why in others.items())
        print(f"{found.op:<20} {found.chosen.name:<16} {reasons}".rstrip())
    return 0
