"""`headrace generate` with an echoing engine: answers, resuming, bad lines, full disks, Ctrl-C."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.generate_run import GenerateOptions, generate
from headrace.cli.main import main
from headrace.cli.prompt_file import PromptOptions
from headrace.core.sampling import Coupling, SamplingParams
from headrace.errors import CheckpointError, ConfigError, InvalidRequest, OutputError
from headrace.model.tiny import write_tiny
from headrace.recipe import Tokenizer
from tests.unit.cli import generate_fakes as fakes
from tests.unit.cli.generate_fakes import TEXT, Case


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


# --- one prompt ----------------------------------------------------------------------------------


def test_one_prompt_is_answered_on_standard_output(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    assert case.ask(case.engine(), "Hello") == 0
    assert capsys.readouterr().out == TEXT + "\n"


def test_random_weights_are_announced(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.ask(case.engine(), "Hello")
    assert "random" not in capsys.readouterr().err
    (case.checkpoint / "headrace.json").write_text('{"random": true, "preset": "x", "seed": 1}')
    case.ask(case.engine(), "Hello")
    assert "random weights" in capsys.readouterr().err


def test_the_answer_is_streamed(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    engine = case.engine()
    engine.on_step = lambda: seen.append(capsys.readouterr().out)
    case.ask(engine, "Hello")
    assert len([text for text in seen if text]) > 2


def test_a_cut_answer_says_so(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.ask(case.engine(), "Hello", PromptOptions(SamplingParams(max_tokens=2)))
    assert "--max-tokens" in capsys.readouterr().err


def test_reasoning_goes_to_standard_error(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.ask(case.engine(), "Hello", PromptOptions(SamplingParams(), thinking=True))
    captured = capsys.readouterr()
    assert captured.out == "\n"  # the echo never ends its reasoning
    assert TEXT in captured.err


def test_chat_raw_and_system_make_different_prompts(case: Case) -> None:
    engine = case.engine()
    sampling = SamplingParams()
    case.ask(engine, "Hello", PromptOptions(sampling, raw=True))
    case.ask(engine, "Hello", PromptOptions(sampling))
    case.ask(engine, "Hello", PromptOptions(sampling, system="Be brief."))
    raw, chat, system = (request.prompt_token_ids for request in engine.requests)
    assert raw == (0, *case.tokenizer.encode("Hello"))
    assert len(raw) < len(chat) < len(system)
    assert "Be brief." in case.tokenizer.decode(system)


def test_a_prompt_can_come_from_standard_input(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "stdin"
    source.write_text("Hello")
    engine = case.engine()
    with source.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        case.ask(engine, "-", PromptOptions(SamplingParams(), raw=True))
    assert engine.requests[0].prompt_token_ids == (0, *case.tokenizer.encode("Hello"))
    source.write_bytes(b"\xff\xfe")
    with source.open() as stdin, pytest.raises(InvalidRequest, match="not UTF-8"):
        monkeypatch.setattr(sys, "stdin", stdin)
        case.ask(engine, "-")


def test_a_failed_prompt_is_an_error(case: Case) -> None:
    class Broken(fakes.EchoEngine):
        def add(self, request: Any) -> None:
            raise InvalidRequest("refused.", param="prompt")

    with pytest.raises(InvalidRequest, match="refused"):
        case.ask(Broken(case.tokenizer), "Hello")


# --- a file of prompts ---------------------------------------------------------------------------


def test_every_kind_of_line_is_answered(case: Case) -> None:
    case.write(
        {"id": "text", "prompt": "Hello"},
        "",
        {"id": "chat", "messages": [{"role": "user", "content": "Hello"}]},
        {"token_ids": [0, 70, 71], "max_tokens": 3},
        {"id": "thinks", "prompt": "Hello", "thinking": True},
    )
    engine = case.engine()
    assert case.run(engine) == 0
    answers = case.answers()
    assert set(answers) == {"text", "chat", "line-4", "thinks"}
    text = answers["text"]
    tokens = [*case.tokenizer.encode(TEXT), 1]
    assert text["text"] == TEXT
    assert text["token_ids"] == tokens
    assert text["finish_reason"] == "stop"
    assert text["prompt_tokens"] == len(engine.requests[0].prompt_token_ids)
    assert text["usage"] == {
        "prompt_tokens": text["prompt_tokens"],
        "completion_tokens": len(tokens),
        "total_tokens": text["prompt_tokens"] + len(tokens),
    }
    assert answers["chat"]["text"] == TEXT
    assert engine.requests[0].prompt_token_ids == engine.requests[1].prompt_token_ids
    assert answers["line-4"]["finish_reason"] == "length"
    assert answers["line-4"]["token_ids"] == tokens[:3]
    assert "reasoning" not in text
    assert (answers["thinks"]["text"], answers["thinks"]["reasoning"]) == ("", TEXT)


def test_short_answers_do_not_wait_for_long_ones(case: Case) -> None:
    case.write(
        {"id": "long", "prompt": "Hello"},
        {"id": "short", "prompt": "Hello", "max_tokens": 1},
    )
    case.run(case.engine())
    ids = [json.loads(line)["id"] for line in case.output.read_text().splitlines()]
    assert ids == ["short", "long"]


def test_sampling_fields_of_a_line_override_the_flags(case: Case) -> None:
    case.write(
        {"prompt": "a"},
        {"prompt": "a", "temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 9, "max_tokens": 2},
        {"prompt": "a", "stop_token_ids": [5], "ignore_eos": True},
        {"prompt": "a"},
    )
    engine = case.engine()
    case.run(engine, prompts=PromptOptions(SamplingParams(temperature=0.5, seed=1, max_tokens=7)))
    plain, own, stops, again = (request.sampling for request in engine.requests)
    assert (plain.temperature, plain.max_tokens) == (0.5, 7)
    assert own == SamplingParams(temperature=0, top_p=0.5, top_k=3, seed=9, max_tokens=2)
    assert (stops.stop_token_ids, stops.ignore_eos) == ((5,), True)
    assert len({plain.seed, stops.seed, again.seed}) == 3  # a seed per line, from --seed
    seeds = [request.sampling.seed for request in engine.requests]
    case.output.unlink()
    engine = case.engine(queue=1)
    case.run(engine, prompts=PromptOptions(SamplingParams(temperature=0.5, seed=1, max_tokens=7)))
    assert [request.sampling.seed for request in engine.requests] == seeds


def test_the_default_length_fits_the_context(case: Case) -> None:
    case.write({"token_ids": [5] * 90}, {"token_ids": [5] * 100})
    engine = case.engine(max_model_len=100)
    assert case.run(engine) == 1
    assert [request.sampling.max_tokens for request in engine.requests] == [10]
    error = case.answers()["line-2"]["error"]
    assert error["code"] == "context_length_exceeded"
    assert "100 tokens" in error["message"]


def test_the_engine_holds_a_bounded_number_of_requests(case: Case) -> None:
    case.write(*({"prompt": "a"} for _ in range(50)))
    engine = case.engine()
    assert case.run(engine, overrides={"engine.max_num_seqs": 4}) == 0
    assert engine.most_running == 8
    assert len(case.answers()) == 50


def test_a_full_queue_is_waited_for(case: Case) -> None:
    case.write(*({"prompt": "a"} for _ in range(10)))
    engine = case.engine(queue=3)
    assert case.run(engine) == 0
    assert engine.most_running == 3
    assert len(case.answers()) == 10


def test_bad_lines_become_error_lines_and_exit_code_1(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    case.write(
        {"id": "good", "prompt": "Hello"},
        '{"id": "cut", "prompt": "Hel',
        {"id": "both", "prompt": "a", "token_ids": [1]},
        {"id": "none"},
        {"id": "field", "prompt": "a", "temprature": 1},
        {"id": "type", "prompt": "a", "max_tokens": "9"},
        {"id": "range", "prompt": "a", "max_tokens": -1},
        {"id": "role", "messages": [{"role": "wizard", "content": "a"}]},
        {"id": "empty", "prompt": ""},
        "[1, 2]",
        {"id": "broken", "token_ids": [5, fakes.BROKEN_TOKEN]},
        {"id": "lone", "prompt": "\ud800"},
        {"id": "last", "prompt": "Hello"},
    )
    with case.input.open("ab") as file:
        file.write(b'{"prompt": "\xff"}\n')
    assert case.run(case.engine()) == 1
    answers = case.answers()
    good = {name for name, answer in answers.items() if "error" not in answer}
    assert good == {"good", "last"}
    errors = {name: answers[name]["error"] for name in answers if name not in good}
    assert len(errors) == 12
    assert all(error["message"] for error in errors.values())
    assert errors["line-2"]["line"] == 2
    assert errors["both"]["line"] == 3 and "exactly one" in errors["both"]["message"]
    assert "temprature" in errors["field"]["message"]
    assert errors["type"]["param"] == "max_tokens"
    assert errors["range"]["param"] == "max_tokens"
    assert errors["broken"]["message"] == "not finite"
    assert errors["line-14"]["code"] == "invalid_request_error"
    assert "line 2: " in capsys.readouterr().err


def test_many_bad_lines_do_not_flood_the_screen(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    case.write(*("nonsense" for _ in range(200)))
    assert case.run(case.engine()) == 1
    assert len(case.answers()) == 200
    assert len(capsys.readouterr().err.splitlines()) < 30


# --- what is refused before the model is loaded --------------------------------------------------


def test_duplicate_ids_are_refused_up_front(case: Case) -> None:
    case.write({"id": "a", "prompt": "x"}, {"id": "line-1", "prompt": "y"}, {"id": "a"})
    engine = case.engine()
    with pytest.raises(InvalidRequest, match='"a" in lines 1 and 3'):
        case.run(engine)
    case.write({"prompt": "x"}, {"id": "line-1", "prompt": "y"})
    with pytest.raises(InvalidRequest, match='"line-1" in lines 1 and 2'):
        case.run(engine)
    assert engine.loads == 0
    assert not case.output.exists()


def test_unusable_files_are_refused_up_front(case: Case, tmp_path: Path) -> None:
    engine = case.engine()
    with pytest.raises(InvalidRequest, match="cannot be read"):
        case.run(engine)
    case.write("")
    with pytest.raises(InvalidRequest, match="no lines"):
        case.run(engine)
    case.write({"prompt": "a"})
    with pytest.raises(InvalidRequest, match="same file"):
        case.run(engine, output=case.input)
    with pytest.raises(OutputError, match="cannot be opened"):
        case.run(engine, output=tmp_path / "missing" / "out.jsonl")
    case.input = tmp_path
    with pytest.raises(InvalidRequest, match="not a regular file"):
        case.run(engine)
    assert engine.loads == 0


@pytest.mark.parametrize(
    "content", ["my notes\n", '{"id": "a"}\nmy notes', '["id"]\n', "my notes", '{"name": 1}\n']
)
def test_a_foreign_output_file_is_not_touched(case: Case, content: str) -> None:
    case.write({"id": "a", "prompt": "x"})
    case.output.write_text(content)
    with pytest.raises(InvalidRequest, match="nothing was changed"):
        case.run(case.engine())
    assert case.output.read_text() == content


def test_an_output_of_another_input_is_not_touched(case: Case) -> None:
    case.write({"id": "a", "prompt": "x"})
    content = '{"id":"b","text":""}\n'
    case.output.write_text(content)
    with pytest.raises(InvalidRequest, match='answer to "b"'):
        case.run(case.engine())
    assert case.output.read_text() == content


def test_two_runs_cannot_write_one_output(case: Case) -> None:
    case.write({"prompt": "x"})
    with case.output.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another process"):
            case.run(case.engine())


def test_usage_and_settings_are_checked(case: Case, tmp_path: Path) -> None:
    engine = case.engine()
    case.write({"prompt": "x"})
    for prompt, input_path, output in [
        (None, None, None),
        ("Hello", case.input, None),
        ("Hello", None, case.output),
        ("", None, None),
    ]:
        options = GenerateOptions(
            checkpoint=case.checkpoint,
            prompt=prompt,
            input_path=input_path,
            output_path=output,
            prompts=PromptOptions(SamplingParams()),
        )
        with pytest.raises(InvalidRequest):
            generate(options, engine.load)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        case.run(engine, overrides={"engine.max_num_seqs": 0})
    case.checkpoint = tmp_path / "nowhere"
    with pytest.raises(CheckpointError, match="no directory"):
        case.run(engine)
    assert engine.loads == 0


def test_settings_come_from_flags_and_file(case: Case, tmp_path: Path) -> None:
    case.write({"prompt": "x"})
    config = tmp_path / "settings.toml"
    config.write_text('[engine]\ndtype = "bfloat16"\nmax_num_seqs = 3\n')
    engine = case.engine()
    case.run(engine, config_path=config, overrides={"engine.max_num_seqs": 1000})
    assert engine.config is not None
    assert engine.config.dtype == "bfloat16"
    assert engine.config.max_num_seqs == 1000
    assert engine.config.max_num_batched_tokens == 1000


# --- stopping and resuming -----------------------------------------------------------------------


def stop_at_step(number: int, signals: int = 1) -> Callable[[], None]:
    """Sends SIGINT to this process in the given step and the following ones."""
    steps = 0

    def on_step() -> None:
        nonlocal steps
        steps += 1
        if number <= steps < number + signals:
            os.kill(os.getpid(), signal.SIGINT)

    return on_step


def test_ctrl_c_keeps_finished_lines_and_the_next_run_goes_on(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"id": f"p{i}", "prompt": f"prompt {i}"} for i in range(10)]
    case.write(*lines)
    first = case.engine()
    steps = len(case.tokenizer.encode(TEXT)) + 1
    first.on_step = stop_at_step(steps + 2)
    overrides = {"engine.max_num_seqs": 2}
    before = signal.getsignal(signal.SIGINT)
    assert case.run(first, overrides=overrides) == 130
    assert signal.getsignal(signal.SIGINT) is before
    written = case.output.read_text()
    done = set(case.answers())
    assert done == {"p0", "p1", "p2", "p3"}
    assert set(first.aborted) == {"line-5", "line-6", "line-7", "line-8"}
    err = capsys.readouterr().err
    assert "4 of 10 lines are answered" in err and "same command again" in err
    assert "interrupted, finishing the running step (once more: at once)" in err

    second = case.engine()
    assert case.run(second, overrides=overrides) == 0
    assert case.output.read_text().startswith(written)
    assert set(case.answers()) == {line["id"] for line in lines}
    assert len(second.requests) == 6
    assert "resuming: 4 of 10" in capsys.readouterr().err

    third = case.engine()
    assert case.run(third) == 0
    assert third.loads == 0
    assert "nothing to do" in capsys.readouterr().err


def test_a_second_ctrl_c_stops_at_once(case: Case) -> None:
    case.write({"prompt": "a"})
    engine = case.engine()

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    engine.on_step = twice
    with pytest.raises(KeyboardInterrupt):
        case.run(engine)


def test_a_line_cut_by_a_crash_is_removed_and_answered_again(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    case.write(*({"id": f"p{i}", "prompt": "x"} for i in range(3)))
    case.run(case.engine())
    whole = case.output.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in (1, 7, len(lines[2]) - 1):
        case.output.write_bytes(lines[0] + lines[1] + lines[2][:cut])
        engine = case.engine()
        assert case.run(engine) == 0
        assert len(engine.requests) == 1
        assert case.output.read_bytes() == whole
        assert f"incomplete last line of {cut} bytes" in capsys.readouterr().err


def test_errors_of_an_earlier_run_still_count(case: Case) -> None:
    case.write({"id": "bad"}, {"id": "good", "prompt": "x"})
    case.run(case.engine())
    engine = case.engine()
    assert case.run(engine) == 1
    assert engine.loads == 0


# --- writing fails -------------------------------------------------------------------------------


def test_a_full_disk_is_an_output_error_that_says_how_far_it_came(case: Case) -> None:
    case.write({"prompt": "x"}, {"prompt": "y"})
    with pytest.raises(OutputError) as full:
        case.run(case.engine(), output=Path("/dev/full"))
    assert full.value.exit_code == 4
    assert "No space left on device" in full.value.message
    assert "0 of 2 lines are answered" in full.value.message


def test_a_line_that_does_not_fit_is_taken_back(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.write(*({"id": f"p{i}", "prompt": "x"} for i in range(4)))
    real_write = os.write
    writes = 0

    def disk_fills_up(descriptor: int, data: bytes) -> int:
        nonlocal writes
        writes += 1
        if writes <= 2:
            return real_write(descriptor, data)
        if writes == 3:
            return real_write(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", disk_fills_up)
        with pytest.raises(OutputError, match=r"2 of 4 .* same command again"):
            case.run(case.engine())
    assert len(case.answers()) == 2
    assert case.run(case.engine()) == 0
    assert set(case.answers()) == {"p0", "p1", "p2", "p3"}


def test_a_full_disk_behind_standard_output_is_an_output_error(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "wb", buffering=0) as full:

        class Stdout:
            buffer = full

        monkeypatch.setattr(sys, "stdout", Stdout())
        with pytest.raises(OutputError, match="No space left"):
            case.ask(case.engine(), "Hello")


# --- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "CHECKPOINT"),
        (["nowhere"], 2, "--input"),
        (["nowhere", "Hello"], 3, "no directory"),
        (["nowhere", "Hello", "--temperature", "3"], 2, "temperature must be in [0, 2]"),
        (["nowhere", "Hello", "--max-tokens", "-1"], 2, "max_tokens"),
        (["nowhere", "Hello", "--dtype", "float8"], 2, "float8"),
        (["nowhere", "Hello", "--max-token", "5"], 2, "--max-token"),
        (["nowhere", "--max-token"], 2, "unknown option --max-token"),
        (["nowhere", ""], 2, "prompt is empty"),
        (["nowhere", "- a list"], 3, "no directory"),
    ],
)
def test_exit_codes(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["generate", *arguments])
    assert left.value.code == code
    assert text in capsys.readouterr().err


def test_help_teaches_by_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["generate", "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    for word in ("headrace generate my-model", "--input", '"messages"', "same command again"):
        assert word in " ".join(out.split())


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object) -> list[int]:
        raise AssertionError("was tokenized")

    engine = case.engine()
    monkeypatch.setattr(Tokenizer, "encode", encode)
    monkeypatch.setattr(Tokenizer, "encode_prompt", encode)
    case.write({"prompt": "x" * 2**20})
    for raw, param in ((True, "prompt"), (False, "messages")):
        case.output.unlink(missing_ok=True)
        prompts = PromptOptions(SamplingParams(), raw=raw)
        assert case.run(engine, prompts=prompts) == 1
        (answer,) = case.answers().values()
        error = answer["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "at least" in error["message"]


def test_a_line_may_say_how_drafts_are_used(case: Case) -> None:
    case.write(
        {"prompt": "a"},
        {"prompt": "a", "coupling": "maximal", "speculation": "fixed:2"},
        {"prompt": "a", "coupling": "both"},
        {"prompt": "a", "speculation": ["off"]},
    )
    engine = case.engine()
    flags = PromptOptions(SamplingParams(coupling=Coupling.GUMBEL))
    assert case.run(engine, prompts=flags) == 1
    plain, own = (request.sampling for request in engine.requests)
    assert (plain.coupling, plain.speculation) == (Coupling.GUMBEL, None)
    assert (own.coupling, own.speculation) == (Coupling.MAXIMAL, "fixed:2")
    lines = [json.loads(line) for line in case.output.read_text().splitlines()]
    errors = [line["error"]["message"] for line in lines if "error" in line]
    assert ['"gumbel", "maximal"' in text for text in errors] == [True, False]
    assert ['"off", "adaptive" or "fixed:K"' in text for text in errors] == [False, True]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--speculation", "fixed:4"], "--speculation .* block has 3"),
        (["--speculation", "often"], '--speculation.* "off", "adaptive" or "fixed:K"'),
        (["--coupling", "both"], "gumbel"),
        (["--speculation", "fixed:3", "--coupling", "maximal"], None),
        (["--speculation", "off"], None),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_flags_say_how_drafts_are_used(
    command: str,
    flags: list[str],
    text: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_tiny(tmp_path / "model", preset="tiny-8", seed=1)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    prompt = ["Hello"] if command == "generate" else ["--no-thinking"]
    arguments = [command, str(tmp_path / "model"), *prompt, "--max-tokens", "3", *flags]
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert (caught.value.code == 0) == (text is None)
    assert re.search(text or "", capsys.readouterr().err)


def test_top_k_0_is_off_in_a_line_as_in_a_flag(case: Case) -> None:
    case.write({"prompt": "a", "top_k": 0}, {"prompt": "b", "top_k": -1})
    engine = case.engine()
    assert case.run(engine, prompts=PromptOptions(SamplingParams(top_k=5))) == 0
    assert [request.sampling.top_k for request in engine.requests] == [-1, -1]
