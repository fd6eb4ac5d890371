"""Size budget of Python files: at most 600 lines a file and 60 lines a function.

The docstring of a function does not count: that of a command is its help text. Tests and
`headrace/ops/triton` are exempt from the function cap (a kernel is one function). Run by
`scripts/check`: `python scripts/size_budget.py [ROOT]`; prints one line per finding, exit code 1 if
there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
FOLDERS = ("headrace", "scripts", "bench", "train", "tests")
NO_FUNCTION_CAP = ("tests/", "headrace/ops/triton/")


def findings(name: str, source: str) -> Iterator[str]:
    """What in one file breaks the budget; `name` is its path from the root, with slashes."""
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{name}: {lines} lines, at most {MAX_FILE_LINES}: split it by idea"
    if name.startswith(NO_FUNCTION_CAP):
        return
    for node in ast.walk(ast.parse(source, name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = _lines(node) - (_lines(node.body[0]) if ast.get_docstring(node) else 0)
            if length > MAX_FUNCTION_LINES:
                yield (
                    f"{name}:{node.lineno}: function {node.name} has {length} lines, "
                    f"at most {MAX_FUNCTION_LINES}"
                )


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def main(root: Path) -> int:
    """Print all findings under `root`; 1 if there is one, else 0."""
    files = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    found = [
        line
        for path in files
        for line in findings(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
    ]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
