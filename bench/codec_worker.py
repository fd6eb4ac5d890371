"""One side of bench/codec.py: answers calls on standard input, one JSON line each.

    python codec_worker.py ours|peer TOKENIZER_JSON official|clients

Calls: `encode` times JSON bytes -> ids for every body of a file; `stream` times ids -> JSON events
for interleaved streams. Each answer carries a digest of what was made, so that the caller can see
that both sides made the same. Runs in the environment of its side; started by codec_peer.py.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_CALL_ID = re.compile(rb"(call_\d\d_(?:ET_)?)[0-9A-Za-z]{24}")
_TIME = re.compile(rb'("(?:created|created_at|completed_at)": ?)\d+')
Reply = dict[str, Any]


class Ours:
    """headrace.recipe. Both of its caches are on, as they are in a server."""

    def __init__(self, tokenizer: Path, level: str) -> None:
        import importlib.metadata

        from headrace.recipe.options import ConvertOptions, Level
        from headrace.recipe.protocols.chat import convert_chat
        from headrace.recipe.protocols.messages import convert_messages
        from headrace.recipe.protocols.responses import convert_responses
        from headrace.recipe.render import render
        from headrace.recipe.tokenizer import Tokenizer

        self.tokenizer = Tokenizer(tokenizer.read_bytes())
        self._options = ConvertOptions(level=Level(level))
        self._convert = {
            "chat": convert_chat,
            "responses": convert_responses,
            "messages": convert_messages,
        }
        self._render = render
        self.versions = {
            name: importlib.metadata.version(name)
            for name in ("fastokens", "tokenizers", "msgspec")
            if importlib.util.find_spec(name) is not None
        }

    def encode(self, protocol: str, body: bytes) -> Sequence[int]:
        """Ids of the prompt of a request."""
        converted = self._convert[protocol](body, self._options)
        prompt = self._render(converted.conversation, converted.version, self._options.special)
        ids: Sequence[int] = self.tokenizer.encode_prompt(prompt)
        return ids

    def streams(self, protocol: str, bodies: Sequence[bytes]) -> Any:
        """A step function: ids of every stream -> JSON events of every stream."""
        from headrace.recipe.chunks import Finish, Ready, Tokens
        from headrace.recipe.stream import AnswerStream, StreamBatch

        batch, streams = StreamBatch(), []
        for number, body in enumerate(bodies):
            converted = self._convert[protocol](body, self._options)
            streams.append(
                AnswerStream(
                    converted,
                    response_id=f"resp-{number}",
                    model="DeepSeek-V4.1-Flash",
                    special=self._options.special,
                    tokenizer=self.tokenizer,
                    created=0,
                )
            )

        def start() -> list[bytes]:
            return batch.push((stream, Ready(100, 64, "fp")) for stream in streams)

        def step(ids: Sequence[tuple[int, Sequence[int]]]) -> list[bytes]:
            return batch.push([(streams[n], Tokens(tokens)) for n, tokens in ids])

        def end() -> list[bytes]:
            return batch.push((stream, Finish()) for stream in streams)

        return start, step, end


class Peer:
    """deepseek-recipe as a Python program uses it."""

    def __init__(self, tokenizer: Path, level: str) -> None:
        import deepseek_recipe as recipe

        self._recipe = recipe
        self._tokenizer = recipe.Tokenizer.from_file(str(tokenizer))
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(self._tokenizer)
        self._options = recipe.ConversionOptions()
        self._request = {
            "chat": recipe.ChatCompletionRequest,
            "responses": recipe.ResponsesRequest,
            "messages": recipe.MessagesRequest,
        }
        self.versions = {"deepseek_recipe": recipe.__version__}

    def encode(self, protocol: str, body: bytes) -> Sequence[int]:
        """Ids of the prompt of a request."""
        converted = self._request[protocol](body).convert(self._options)
        ids: Sequence[int] = self._encoding.encode(converted.conversation)
        return ids

    def streams(self, protocol: str, bodies: Sequence[bytes]) -> Any:
        """A step function: ids of every stream -> JSON events of every stream."""
        recipe, kind = self._recipe, self._request[protocol]
        processors = []
        for number, body in enumerate(bodies):
            request = kind(body)
            converted = request.convert(self._options)
            generator = kind.chunk_generator(converted, f"resp-{number}", "DeepSeek-V4.1-Flash")
            processors.append(
                recipe.StreamProcessor(generator, converted.parsing_options, self._tokenizer)
            )
        chunk, usage = recipe.InferenceChunk, recipe.PromptUsage

        def start() -> list[list[str]]:
            ready = {"prompt_tokens": 100, "prompt_cache_hit_tokens": 64}
            return [
                [
                    event.to_json()
                    for event in p.push(
                        chunk.ready(prompt_usage=usage(**ready), system_fingerprint="fp")
                    )
                ]
                for p in processors
            ]

        def step(ids: Sequence[tuple[int, Sequence[int]]]) -> list[list[str]]:
            return [
                [event.to_json() for event in processors[number].push(chunk.tokens(tokens))]
                for number, tokens in ids
            ]

        def end() -> list[list[str]]:
            last = chunk.finish(recipe.InferenceFinishReason.Stop)
            return [[event.to_json() for event in p.push(last)] for p in processors]

        return start, step, end


def encode(side: Ours | Peer, call: Reply) -> Reply:
    """Wall and CPU seconds for all bodies, tokens, and a digest of all ids."""
    bodies = [bytes.fromhex(line) for line in Path(call["bodies"]).read_text().split()]
    gc.collect()
    made = []
    wall, cpu = time.perf_counter(), time.process_time()
    for body in bodies:
        made.append(side.encode(call["protocol"], body))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    digest = hashlib.sha256()
    for ids in made:
        digest.update(struct.pack(f"<{len(ids)}I", *ids))
    return {"wall": wall, "cpu": cpu, "tokens": sum(map(len, made)), "digest": digest.hexdigest()}


def stream(side: Ours | Peer, call: Reply) -> Reply:
    """Wall and CPU seconds for the steps of all streams, events, and a digest of the events."""
    job = json.loads(Path(call["job"]).read_text())
    size = call["ids_per_chunk"]
    bodies = [body.encode() for body in job["bodies"]]
    streams = job["ids"]
    steps = max(-(-len(ids) // size) for ids in streams)
    plan = [
        [
            (n, ids[i * size : i * size + size])
            for n, ids in enumerate(streams)
            if i * size < len(ids)
        ]
        for i in range(steps)
    ]
    gc.collect()
    start, step, end = side.streams(job["protocol"], bodies)
    made = [start()]
    wall, cpu = time.perf_counter(), time.process_time()
    for part in plan:
        made.append(step(part))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    made.append(end())
    return {"wall": wall, "cpu": cpu, "tokens": sum(map(len, streams)), **_events(made)}


def _events(made: Sequence[Sequence[bytes | list[str]]]) -> Reply:
    """Number of events and a digest of them, clock and random ids replaced."""
    digest, count = hashlib.sha256(), 0
    for step in made:
        for part in step:
            events = [event.encode() for event in part] if isinstance(part, list) else _data(part)
            for event in events:
                data = _TIME.sub(rb"\g<1>0", _CALL_ID.sub(rb"\g<1>", event))
                # Key order and white space belong to nobody's contract.
                digest.update(json.dumps(json.loads(data), sort_keys=True).encode())
            count += len(events)
    return {"events": count, "digest": digest.hexdigest()}


def _data(frames: bytes) -> list[bytes]:
    """The data of server-sent events."""
    return [line[6:] for line in frames.splitlines() if line.startswith(b"data: ")]


def main() -> None:
    """Answer calls until standard input ends."""
    name, tokenizer, level = sys.argv[1:]
    sides: dict[str, Callable[[Path, str], Ours | Peer]] = {"ours": Ours, "peer": Peer}
    calls = {"encode": encode, "stream": stream}
    answers, sys.stdout = sys.stdout, sys.stderr
    side = sides[name](Path(tokenizer), level)
    print(json.dumps({"result": side.versions}), file=answers, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            reply = {"result": calls[call["call"]](side, call)}
        except Exception:
            reply = {"error": f"{name}:\n{traceback.format_exc()}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
