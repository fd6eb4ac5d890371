"""Random damage to requests and model outputs: what the token codec must survive.

    python bench/fuzz_codec.py [--seconds 60] [--seed 1] [--direction encode|decode|both]
    python bench/fuzz_codec.py --replay encode:1:4711      # one case again, with its traceback
    python bench/fuzz_codec.py --extremes                  # megabytes of one character, 2 s each

A case is a golden request or output, mutated (fuzz_mutate.py), and run at both levels: a request is
converted, rendered and encoded, an output is parsed in random pieces into events and a complete
response. What must hold: no exception but the documented ones; ids of control tokens only where the
template puts them; what `official` accepts, `clients` accepts with the same prompt, unless the body
has a field that only `clients` reads; events and responses are JSON; at `clients`, arguments of
every finished call are JSON and the concatenated result is the same for two ways of cutting. Every
case has a time limit by its size, and the process a memory limit. One JSON line; exit code 1 on any
failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz_mutate import cut_up, mutated_output, mutated_request

from headrace.check.recipe_cases import case_files, find_tokenizer
from headrace.check.recipe_encode import body_of
from headrace.errors import HeadraceError, InvalidRequest
from headrace.recipe.chunks import EngineFinish, Finish, Ready, Text, Tokens
from headrace.recipe.converted import ConvertedRequest
from headrace.recipe.options import ConvertOptions, Level
from headrace.recipe.protocols.convert import convert
from headrace.recipe.protocols.sampling import resolve_max_tokens
from headrace.recipe.render import render
from headrace.recipe.stream import AnswerStream
from headrace.recipe.tokenizer import Tokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "recipe"
PROTOCOLS = ("chat", "responses", "messages")
# Bodies with one of these may give another prompt at level `clients`, or be refused there.
CLIENT_FIELDS = (
    "chat_template_kwargs", '"reasoning"', "developer", "previous_response_id", "redacted_thinking",
    "x-anthropic-billing-header", '"thinking"', "effort", "functions", '"function_call"', "task",
    "max_completion_tokens", '"custom"', '"n"', "top_k", "allowed_tools", '"any"',
)  # fmt: skip
LIMIT_S, LIMIT_S_PER_MB = 1.0, 2.0
LIMIT_MB = 600
EXTREME_S = 2.0


class Violation(AssertionError):
    """Something that must hold does not."""


class Fuzz:
    """Cases of one seed. `failures` hold what to replay and the end of the traceback."""

    def __init__(self, seed: int, tokenizer: Tokenizer | None = None) -> None:
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.slowest: dict[str, Any] = {"ms": 0.0}
        self.no_grammar = False  # whether the last refusal was one of the grammar maker
        self.tokenizer = tokenizer or find_tokenizer(GOLDEN)
        self.added = self.tokenizer.added
        self.controls = frozenset(self.added.values())
        cases = {file.kind: list(file.cases()) for file in case_files(GOLDEN)}
        # Refused ones are donors too, but most damage should be done to what is accepted.
        self.requests = {
            name: [
                request
                for case in cases[f"encode_{name}"]
                if (request := _parsed(case)) is not None
                for _ in range(1 if "expect_error" in case else 5)
            ]
            for name in PROTOCOLS
        }
        self.decodes = {name: cases[f"decode_{name}"] for name in PROTOCOLS}
        self.outputs = sorted(
            {
                case["output_text"]
                for name in PROTOCOLS
                for case in self.decodes[name]
                if case.get("output_text")
            }
        )
        self._cases: dict[str, Callable[[random.Random], int]] = {
            "encode": self.encode_case,
            "decode": self.decode_case,
        }

    def run(self, direction: str, index: int) -> None:
        """One case; failures are noted, not raised."""
        started = time.process_time()
        size = 0
        try:
            size = self.replay(direction, index)
        except Exception as error:
            self.failures.append(
                {
                    "case": f"{direction}:{self.seed}:{index}",
                    "error": f"{type(error).__name__}: {str(error)[:300]}",
                    "at": _place(error),
                }
            )
        took = time.process_time() - started
        if took * 1e3 > self.slowest["ms"]:
            self.slowest = {"ms": round(took * 1e3, 1), "case": f"{direction}:{self.seed}:{index}"}
        if took > LIMIT_S + LIMIT_S_PER_MB * size / 1e6:
            self.failures.append(
                {"case": f"{direction}:{self.seed}:{index}", "error": f"took {took:.1f} s"}
            )
        self.counts[direction] += 1

    def replay(self, direction: str, index: int) -> int:
        """One case, raising what it raises; returns the size of its input."""
        return self._cases[direction](random.Random(f"{direction}-{self.seed}-{index}"))

    # --- requests --------------------------------------------------------------------------------

    def encode_case(self, rng: random.Random) -> int:
        """A damaged request at both levels."""
        protocol = rng.choice(PROTOCOLS)
        donors = self.requests[protocol if rng.random() < 0.9 else rng.choice(PROTOCOLS)]
        body = mutated_request(rng, donors)
        prompts: dict[Level, list[str] | None] = {}
        for level in (Level.OFFICIAL, Level.CLIENTS):
            options = ConvertOptions(level=level)
            converted = self._converted(protocol, body, options)
            prompts[level] = None if converted is None else self._encoded(converted, options)
        official = prompts[Level.OFFICIAL]
        if official is not None and prompts[Level.CLIENTS] is None and self.no_grammar:
            self.counts["grammars that cannot be enforced"] += 1
        elif official is not None and official != prompts[Level.CLIENTS]:
            text = body.decode("utf-8", "replace")
            if not any(name in text for name in CLIENT_FIELDS):
                kind = "refuses" if prompts[Level.CLIENTS] is None else "another prompt for"
                raise Violation(f"clients: {kind} what official accepts: {text[:2000]}")
            self.counts["prompts that only clients reads"] += 1
        return len(body)

    def _converted(
        self, protocol: str, body: bytes, options: ConvertOptions
    ) -> ConvertedRequest | None:
        try:
            converted = convert(protocol, body, options)
        except InvalidRequest as error:
            if not error.message or error.http_status != 400:
                raise Violation(f"an error without text or status: {error!r}") from error
            self.counts["refused"] += 1
            # Only `clients` makes grammars, and says what they cannot enforce.
            self.no_grammar = _made_by_grammars(error)
            return None
        self.counts["accepted"] += 1
        return converted

    def _encoded(self, converted: ConvertedRequest, options: ConvertOptions) -> list[str]:
        prompt = render(converted.conversation, converted.version, options.special)
        ids = self.tokenizer.encode_prompt(prompt)
        found = [token for token in ids if token in self.controls]
        if found != [self.added[spelling] for spelling in prompt.specials]:
            raise Violation("a control token where the template puts none")
        with contextlib.suppress(InvalidRequest):
            resolve_max_tokens(
                converted.conversation, converted.inference.max_tokens, len(ids), 1_048_576
            )
        return list(prompt.parts)

    # --- outputs ---------------------------------------------------------------------------------

    def decode_case(self, rng: random.Random) -> int:
        """A damaged output at both levels, as text or as ids, cut in two ways."""
        protocol = rng.choice(PROTOCOLS)
        case = rng.choice(self.decodes[protocol])
        text = mutated_output(rng, self.outputs)
        items: Any = text if rng.random() < 0.5 else self._ids(rng, text)
        finish = rng.choice((*EngineFinish, None))
        for level in (Level.OFFICIAL, Level.CLIENTS):
            options = ConvertOptions(level=level)
            request = json.dumps(case["request"]).encode()
            try:
                converted = convert(protocol, request, options)
            except InvalidRequest:
                continue
            answers = [
                self._answer(converted, options, cut_up(rng, items), finish) for _ in range(2)
            ]
            if level is Level.CLIENTS:
                _check_calls(protocol, answers[0], complete=finish is EngineFinish.STOP)
            whole_json = converted.parsing.parse_json and level is Level.OFFICIAL
            if answers[0] != answers[1] and not whole_json:
                raise Violation(f"{level}: another result for another cut: {_pair(*answers)}")
        return len(text.encode("utf-8", "replace"))

    def _ids(self, rng: random.Random, text: str) -> list[int]:
        ids = list(self.tokenizer.encode_full(text.encode("utf-8", "replace").decode()))
        for _ in range(rng.choice((0, 0, 1, 3))):
            ids.insert(
                rng.randrange(len(ids) + 1),
                rng.choice((rng.randrange(129_280), *self.controls, 10**6)),
            )
        return ids

    def _answer(
        self,
        converted: ConvertedRequest,
        options: ConvertOptions,
        groups: list[Any],
        finish: EngineFinish | None,
    ) -> Any:
        stream = AnswerStream(
            converted,
            response_id="r",
            model="m",
            special=options.special,
            tokenizer=self.tokenizer,
            created=0,
        )
        chunks: list[Any] = [Ready(9, 3, "fp")]
        chunks += [
            Text(group, 0) if isinstance(group, str) else Tokens(tuple(group)) for group in groups
        ]
        if finish is not None:
            chunks.append(Finish(finish))
        try:
            for chunk in chunks:
                if stream.finished:
                    break
                for event in stream.push(chunk):
                    json.loads(event.data)
            for event in stream.finish():
                json.loads(event.data)
        except HeadraceError as error:
            self.counts["stream errors"] += 1
            return f"error: {error.message}"
        return _anonymous(json.loads(stream.response()))


def _parsed(case: dict[str, Any]) -> Any:
    """The request of a case as a JSON value, if it is one of moderate size."""
    body = body_of(case)
    if len(body) > 20_000:
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _anonymous(value: Any) -> Any:
    """A response without random ids and without what depends on the way of cutting.

    Tokens are counted by pieces: those behind a stop sequence, in the piece it ends in, count too.
    """
    if isinstance(value, dict):
        return {
            key: item if key != "call_id" else None
            for key, item in ((key, _anonymous(item)) for key, item in value.items())
            if key not in ("completed_at", "created_at", "created", "logprobs", "usage")
            and not (key == "id" and str(item).startswith(("call_", "toolu_")))
        }
    return [_anonymous(item) for item in value] if isinstance(value, list) else value


def _check_calls(protocol: str, answer: Any, *, complete: bool) -> None:
    """Arguments of the calls of an answer that came to its end are JSON objects."""
    if isinstance(answer, str) or not complete:
        return
    arguments: list[str] = []
    if protocol == "chat":
        message = answer["choices"][0]["message"]
        arguments = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    elif protocol == "responses":
        arguments = [
            item["arguments"] for item in answer["output"] if item["type"] == "function_call"
        ]
    for text in arguments:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise Violation(f"arguments are no JSON: {text[:300]!r}") from error
        if not isinstance(value, dict):
            raise Violation(f"arguments are no object: {text[:300]!r}")


def _pair(one: Any, other: Any) -> str:
    from headrace.check.recipe_cases import first_difference

    return str(first_difference(one, other))[:600]


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(frames))


def _made_by_grammars(error: Exception) -> bool:
    """Also of a call that is demanded where there are no tools: no grammar would allow one, and of
    forms that a request asks for in the words of another protocol.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return any(
        "recipe/grammar" in frame.filename
        or "core/schema" in frame.filename
        or frame.name in ("check_choice", "refuse_form_fields")
        for frame in frames
    )


def _hangs(number: int, frame: FrameType | None) -> None:
    raise Violation("hangs: ten seconds for one case")


def memory_mb() -> float:
    """Largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fuzz(seed: int, seconds: float, directions: tuple[str, ...], cases: int | None = None) -> Fuzz:
    """Run cases of all directions in turn until the time is over, or `cases` of each."""
    run = Fuzz(seed)
    signal.signal(signal.SIGALRM, _hangs)
    before = memory_mb()
    end = time.monotonic() + seconds
    index = 0
    while time.monotonic() < end and index != cases:
        for direction in directions:
            signal.alarm(10)
            run.run(direction, index)
        index += 1
    signal.alarm(0)
    grown = memory_mb() - before
    if grown > LIMIT_MB:
        run.failures.append({"case": "memory", "error": f"grew by {grown:.0f} MB"})
    run.counts["grown_mb"] = round(grown)
    return run


def extreme_times() -> int:
    """Run fuzz_extremes.py: a JSON line with the slowest inputs; beyond 2 s they are failures."""
    from fuzz_extremes import extremes

    times: list[tuple[float, str]] = []
    failures: list[str] = []
    signal.signal(signal.SIGALRM, _hangs)
    for name, call in extremes(find_tokenizer(GOLDEN)):
        started = time.process_time()
        signal.alarm(60)
        try:
            call()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        signal.alarm(0)
        times.append((round(time.process_time() - started, 2), name))
    times.sort(reverse=True)
    failures += [f"{name}: {seconds} s" for seconds, name in times if seconds > EXTREME_S]
    record = {
        "name": "codec-extremes",
        "inputs": len(times),
        "slowest_s": times[:10],
        "failures": failures,
        "memory_mb": round(memory_mb()),
        "python": sys.version.split()[0],
    }
    print(json.dumps(record))
    return 1 if failures else 0


def main() -> int:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--direction", choices=("encode", "decode", "both"), default="both")
    parser.add_argument("--replay", help="direction:seed:index")
    parser.add_argument("--extremes", action="store_true")
    options = parser.parse_args()
    if options.extremes:
        return extreme_times()
    if options.replay:
        direction, seed, index = options.replay.split(":")
        Fuzz(int(seed)).replay(direction, int(index))
        print("the case passes")
        return 0
    directions = ("encode", "decode") if options.direction == "both" else (options.direction,)
    run = fuzz(options.seed, options.seconds, directions)
    record = {
        "name": "fuzz-codec",
        "seed": options.seed,
        "seconds": options.seconds,
        "cases": dict(run.counts),
        "failures": len(run.failures),
        "first_failures": run.failures[:20],
        "slowest": run.slowest,
        "memory_mb": round(memory_mb()),
        "python": sys.version.split()[0],
    }
    print(json.dumps(record, ensure_ascii=False))
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
