"""The golden cases of the codec: every case of every file is equal, and differences are seen.

The first test is `headrace check recipe tests/golden/recipe`, one file a test; the others damage a
case in every stage and see that the check finds exactly that.
"""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.check.recipe import check_file
from headrace.check.recipe_cases import (
    CaseFile,
    case_files,
    expand,
    find_tokenizer,
    first_difference,
    normalised,
)
from headrace.errors import CheckpointError, ConfigError
from tests.unit.recipe import golden

COUNTS = {
    "encode_chat": 416,
    "encode_responses": 158,
    "encode_messages": 153,
    "encode_conversation": 82,
    "decode_chat": 190,
    "decode_responses": 115,
    "decode_messages": 103,
    "tokenizer": 454,
    "image_tokens": 104,
}


def test_the_golden_folder_is_complete() -> None:
    assert {file.kind for file in case_files(golden.GOLDEN)} == set(COUNTS)


@pytest.mark.parametrize("kind", COUNTS)
def test_every_golden_case_is_equal(kind: str) -> None:
    file = CaseFile(golden.GOLDEN / f"{kind}.jsonl.gz", kind)
    result = check_file(file, golden.real_tokenizer())
    assert [str(difference) for difference in result.differences] == []
    assert result.total == result.equal == COUNTS[kind]
    assert result.passed


def checked(tmp_path: Path, kind: str, case: dict[str, Any]) -> list[str]:
    """The stages that differ for one case."""
    path = tmp_path / f"{kind}.jsonl"
    path.write_text(json.dumps(case) + "\n", encoding="utf-8")
    result = check_file(CaseFile(path, kind), golden.real_tokenizer())
    assert result.total == 1
    return [difference.stage for difference in result.differences]


def first(kind: str, *keys: str, without: str = "-") -> dict[str, Any]:
    """The first case with these keys."""
    for case in golden.cases(kind):
        if all(key in case for key in keys) and without not in case:
            return copy.deepcopy(case)
    raise AssertionError(f"{kind} has no case with {keys}")


def damaged(case: dict[str, Any], *path: Any, value: Any = "damaged") -> dict[str, Any]:
    """The case with something else at a place."""
    case = copy.deepcopy(case)
    place: Any = case
    for key in path[:-1]:
        place = place[key]
    assert place[path[-1]] != value
    place[path[-1]] = value
    return case


@pytest.mark.parametrize(
    ("stage", "path", "value"),
    [
        ("conversation", ("expect_conversation", "messages", 0, "content"), "other"),
        ("inference", ("expect_inference", "temperature"), 0.5),
        ("parsing", ("expect_parsing", "parse_tool_calls"), None),
        ("stream", ("expect_stream",), None),
        ("version", ("encoding",), "v5"),
        ("prompt", ("expect_prompt",), "other"),
        ("ranges", ("expect_special_ranges", 1), [0, 1]),
        ("images", ("expect_images",), [1]),
        ("ids", ("expect_token_ids", 3), 5),
        ("max_tokens", ("expect_max_tokens", 0, "max_tokens"), 5),
    ],
)
def test_a_damaged_encode_case_differs_in_its_stage(
    tmp_path: Path, stage: str, path: tuple[Any, ...], value: Any
) -> None:
    case = first("encode_chat", "expect_max_tokens")
    assert checked(tmp_path, "encode_chat", case) == []
    assert checked(tmp_path, "encode_chat", damaged(case, *path, value=value)) == [stage]


@pytest.mark.parametrize(
    ("stage", "path", "value"),
    [
        ("events", ("expect_events", 1, "data", "choices", 0, "delta", "content"), "other"),
        ("counts", ("expect_counts", 0), 7),
        ("finished", ("finished_before_finish_call",), False),
        ("done", ("sse_done_data",), None),
        ("error", ("expect_stream_error",), "other"),
        ("response", ("expect_response", "usage", "completion_tokens"), 99),
    ],
)
def test_a_damaged_decode_case_differs_in_its_stage(
    tmp_path: Path, stage: str, path: tuple[Any, ...], value: Any
) -> None:
    case = {**first("decode_chat", "expect_response"), "expect_stream_error": None}
    assert checked(tmp_path, "decode_chat", case) == []
    assert checked(tmp_path, "decode_chat", damaged(case, *path, value=value)) == [stage]


def test_errors_are_compared_by_stage_status_and_text(tmp_path: Path) -> None:
    cases = [case for case in golden.cases("encode_chat") if "expect_error" in case]
    convert = next(c for c in cases if c["expect_error"]["stage"] == "convert")
    other = damaged(convert, "expect_error", "body", "error", "message", value="Empty")
    assert checked(tmp_path, "encode_chat", convert) == []
    assert checked(tmp_path, "encode_chat", other) == ["error"]
    wrong_stage = damaged(convert, "expect_error", "stage", value="deserialize")
    assert checked(tmp_path, "encode_chat", wrong_stage) == ["error"]
    # The text of a deserialize error is a library's.
    body = next(c for c in cases if c["expect_error"]["stage"] == "deserialize")
    assert checked(tmp_path, "encode_chat", damaged(body, "expect_error", "message")) == []
    accepted = {key: item for key, item in convert.items() if key != "expect_error"}
    assert checked(tmp_path, "encode_chat", accepted) == ["error"]
    refused = {**first("encode_chat", "expect_prompt"), "expect_error": convert["expect_error"]}
    assert checked(tmp_path, "encode_chat", refused) == ["error"]


def test_a_validators_text_counts_by_its_beginning(tmp_path: Path) -> None:
    case = next(c for c in golden.cases("encode_chat") if "tool-schema-invalid" in c["id"])
    path = ("expect_error", "body", "error", "message")
    text: str = case["expect_error"]["body"]["error"]["message"]
    start = "Invalid schema for function 'x': "
    assert text.startswith(start)
    assert checked(tmp_path, "encode_chat", damaged(case, *path, value=start + "other")) == []
    assert checked(tmp_path, "encode_chat", damaged(case, *path, value="Invalid x: ")) == ["error"]
    ours = start + "schema must be a JSON Schema of 'type: \"object\"', got 'type: null'."
    assert checked(tmp_path, "encode_chat", damaged(case, *path, value=ours)) == ["error"]


def test_damaged_ids_and_image_sizes_differ(tmp_path: Path) -> None:
    case = first("tokenizer", "full_vocab_ids")
    assert checked(tmp_path, "tokenizer", damaged(case, "plain_ids", 0, value=0)) == ["plain_ids"]
    full = damaged(case, "full_vocab_ids", 0, value=0)
    assert checked(tmp_path, "tokenizer", full) == ["full_vocab_ids"]
    image = first("image_tokens", "tokens")
    assert checked(tmp_path, "image_tokens", damaged(image, "tokens", value=1)) == ["tokens"]
    picture = first("image_tokens", "out")
    other = damaged(picture, "out", value=[1, 1])
    assert checked(tmp_path, "image_tokens", other) == ["preprocess"]
    refused = first("image_tokens", "error_kind")
    other = damaged(refused, "error_kind")
    assert checked(tmp_path, "image_tokens", other) == ["preprocess"]


def test_an_undocumented_exception_is_a_difference(tmp_path: Path) -> None:
    case = first("decode_chat", "expect_response")
    case["chunks"].insert(1, {"nonsense": 1})
    assert checked(tmp_path, "decode_chat", case) == ["crash"]


def test_long_expectations_are_compared_by_hash(tmp_path: Path) -> None:
    case = next(c for c in golden.cases("encode_chat") if "long-text" in c["id"])
    assert checked(tmp_path, "encode_chat", case) == []
    for path, stage in (
        (("expect_prompt", "sha256"), "prompt"),
        (("expect_token_ids", "sha256_le_u32"), "ids"),
        (("expect_conversation", "messages", 0, "content", "sha256"), "conversation"),
    ):
        assert checked(tmp_path, "encode_chat", damaged(case, *path)) == [stage]


def test_macros_and_normalised_values() -> None:
    assert expand(
        {"a": [{"$repeat": ["ab", 3]}], "b": {"$concat": ["x", {"$repeat": ["y", 2]}]}}
    ) == {
        "a": ["ababab"],
        "b": "xyy",
    }
    value = {
        "created": 5,
        "completed_at": None,
        "id": "call_00_ET_" + "a" * 20 + "1234",
        "other": "call_00_ET_" + "a" * 20 + "12345",
    }
    assert normalised(value) == {
        "created": 0,
        "completed_at": None,
        "id": "call_00_ET_<RANDOM>",
        "other": value["other"],
    }


def test_differences_name_the_place() -> None:
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == ("a[1].b", 2, 3)
    assert first_difference([1], [1, 2]) == ("[1]", "<absent>", 2)
    assert first_difference({"a": 1}, {"b": 1}) == ("a", 1, "<absent>")
    assert first_difference({"a": 1}, {"a": 1.0}) == ("a", 1, 1.0)
    assert first_difference({"a": 1, "b": 2}, {"b": 2, "a": 1}) is None


def test_unusable_case_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no case files"):
        case_files(tmp_path)
    path = tmp_path / "encode_chat.jsonl"
    path.write_text('{"no": "id"}\n')
    with pytest.raises(ConfigError, match="line 1 is no case: it has no id"):
        list(CaseFile(path, "encode_chat").cases())
    path.write_text("{\n")
    with pytest.raises(ConfigError, match="line 1 is no case"):
        list(CaseFile(path, "encode_chat").cases())
    broken = tmp_path / "encode_chat.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"id": "a"}\n' * 1000)[:-9])
    with pytest.raises(ConfigError, match="cannot be read"):
        list(CaseFile(broken, "encode_chat").cases())
    other = CaseFile(tmp_path / "poems.jsonl", "poems")
    with pytest.raises(ConfigError, match="no such kind of case file"):
        check_file(other, golden.real_tokenizer())


def test_a_missing_tokenizer_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_patch\.json is missing.*--tokenizer FILE"):
        find_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_tokenizer(tmp_path, tmp_path / "absent.json")
    given = tmp_path / "tokenizer.json"
    given.write_bytes(golden.patched_json())
    assert find_tokenizer(tmp_path, tmp_path).encode("a b") == golden.real_tokenizer().encode("a b")
