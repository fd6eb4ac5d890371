"""The engine inside your own process: prompts in, answers out, no server.

Contract: `generate` answers a list of prompts in order, `stream` yields one answer piece by piece.
Both leave the engine without requests of theirs when they end, also by an exception or Ctrl-C. Text
needs a tokenizer, which is given by whoever builds the `LLM`; token ids always work. One thread at
a time: a second one gets an error, never wrong tokens.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType

from headrace.config import EngineConfig
from headrace.core.output import RequestOutput
from headrace.core.plain import is_huge, plain_ids
from headrace.core.protocols import Tokenizer
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.answers import Answer, TextChunk
from headrace.engine.engine import Engine
from headrace.engine.load import ProgressCallback, load_engine
from headrace.errors import HeadraceError, InvalidRequest, Overloaded

__all__ = ["LLM", "Prompt", "TextChunk"]

Prompt = str | Sequence[int]


class LLM:
    """A checkpoint ready to answer; a context manager that frees its memory at the end."""

    def __init__(
        self,
        checkpoint: Path | str,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        """Load the checkpoint directory; see `load_engine` for `progress` and errors."""
        if not isinstance(checkpoint, (str, Path)):
            raise InvalidRequest(
                f"checkpoint must be the path of a directory, got {checkpoint!r}.",
                param="checkpoint",
            )
        if config is not None and not isinstance(config, EngineConfig):
            raise InvalidRequest(
                f"config must be an EngineConfig, got {type(config).__name__}.", param="config"
            )
        engine = load_engine(
            Path(checkpoint), config or EngineConfig(), tokenizer=tokenizer, progress=progress
        )
        self._set_up(engine, tokenizer)

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer | None = None) -> LLM:
        """An LLM over an engine that is already there.

        Stop strings are looked for with the tokenizer that the engine was built with.
        """
        llm = cls.__new__(cls)
        llm._set_up(engine, tokenizer)
        return llm

    def _set_up(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine: Engine | None = engine
        self._tokenizer = tokenizer
        self._answers: dict[str, Answer] = {}
        self._numbered = 0
        self._busy = threading.Lock()
        self._dropped: deque[Answer] = deque()  # streams that were closed while it was busy

    @property
    def engine(self) -> Engine:
        """The engine inside. Raises HeadraceError after `close`."""
        if self._engine is None:
            raise HeadraceError("This LLM is closed.")
        return self._engine

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts; outputs are in the order of the prompts, with `n` per prompt.

        prompts: texts (the begin-of-text token is put in front) or lists of token ids, taken as
        they are. sampling: for all, or one per prompt. progress: show a bar on stderr. A request
        that fails while it runs has `finish` ERROR. Raises InvalidRequest or ContextTooLong before
        anything runs if one of the prompts is bad.
        """
        listed = _listed(prompts)
        each = _one_each(sampling, len(listed))
        with self._alone():
            answers = [
                self._answer(prompt, params, number)
                for number, (prompt, params) in enumerate(zip(listed, each, strict=True))
            ]
            waiting = deque(answers)
            running: list[Answer] = []
            with _progress_bar(len(answers), progress) as advance:
                try:
                    while waiting or running:
                        self._submit_some(waiting, running)
                        self._pump()
                        running = [
                            answer for answer in running if not self._collect(answer, advance)
                        ]
                finally:
                    self._forget(running)
        return [output for answer in answers for output in answer.outputs()]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[TextChunk]:
        """Yield an answer as it grows, at least one chunk. Closing the iterator aborts it.

        With several choices their chunks come mixed; `choice` tells them apart.

        Raises InvalidRequest, ContextTooLong or Overloaded at the first `next`.
        """
        with self._alone():
            answer = self._answer(prompt, _one_each(sampling, 1)[0], None)
            self._submit(answer)
        try:
            while not answer.finished:
                if not answer.inbox:
                    with self._alone():
                        self._pump()
                while answer.inbox:
                    yield answer.take_next()
        finally:
            # Not refused: an iterator may be collected at any time, in any thread.
            self._dropped.append(answer)
            if self._busy.acquire(blocking=False):
                try:
                    self._forget_dropped()
                finally:
                    self._busy.release()

    def close(self) -> None:
        """Abort what runs and free model and cache; the LLM cannot be used afterwards."""
        with self._alone():
            if self._engine is not None:
                self._engine.abort_all()
            self._answers.clear()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- inside ------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the engine; another thread that holds it is an InvalidRequest, not a wait."""
        if not self._busy.acquire(blocking=False):
            raise InvalidRequest(
                "This LLM is working for another thread. Use it from one thread at a time, or run "
                "`headrace serve` for many callers."
            )
        try:
            self._forget_dropped()
            yield
        finally:
            self._busy.release()

    def _forget_dropped(self) -> None:
        while self._dropped:
            self._forget([self._dropped.popleft()])

    def _answer(self, prompt: Prompt, params: SamplingParams, number: int | None) -> Answer:
        """Build and check a request; errors name the prompt by `number`."""
        try:
            request = Request(f"llm-{self._numbered}", self._prompt_ids(prompt), params)
            self.engine.check(request)
        except InvalidRequest as error:
            if number is None:
                raise
            raise type(error)(f"prompt {number}: {error.message}", param=error.param) from error
        self._numbered += 1
        return Answer.of(request, self._tokenizer)

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            ids = plain_ids(prompt)
            if ids is None:
                raise InvalidRequest(
                    f"A prompt is text or a list of token ids, got {type(prompt).__name__}.",
                    param="prompt",
                )
            for position, token in enumerate(ids):
                if not isinstance(token, int) or isinstance(token, bool) or is_huge(token):
                    raise InvalidRequest(
                        f"Token {position} of the prompt is a {type(token).__name__} that is no "
                        "token id; token ids are integers.",
                        param="prompt",
                    )
            # Each was checked above, which mypy cannot carry over to the list.
            return ids  # type: ignore[return-value]
        if self._tokenizer is None:
            raise InvalidRequest(
                "A text prompt needs a tokenizer: build the LLM with tokenizer=..., or give token "
                "ids.",
                param="prompt",
            )
        if not prompt:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        return (self.engine.spec.bos_id, *self._tokenizer.encode(prompt))

    def _submit(self, answer: Answer) -> None:
        self.engine.add(answer.request)
        self._answers[answer.request.request_id] = answer

    def _submit_some(self, waiting: deque[Answer], running: list[Answer]) -> None:
        """Hand over requests until the engine's queue is full."""
        while waiting:
            try:
                self._submit(waiting[0])
            except Overloaded:
                if not self.engine.has_work():
                    raise
                return
            running.append(waiting.popleft())

    def _pump(self) -> None:
        """One engine step; its chunks go to whoever waits for them."""
        for chunk in self.engine.step():
            answer = self._answers.get(chunk.request_id)
            if answer is not None:  # None: given up by its caller
                answer.inbox.append(chunk)

    def _collect(self, answer: Answer, advance: Callable[[], None]) -> bool:
        """Take what has come in; True when the answer is complete."""
        while answer.inbox:
            answer.take_next()
        if not answer.finished:
            return False
        del self._answers[answer.request.request_id]
        advance()
        return True

    def _forget(self, answers: list[Answer]) -> None:
        """Abort those that still run; their last chunks are dropped."""
        for answer in answers:
            self._answers.pop(answer.request.request_id, None)
            if self._engine is not None:
                self._engine.abort(answer.request.request_id)


def _listed(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts of a list, or of any other iterable of prompts."""
    if isinstance(prompts, str):
        raise InvalidRequest("prompts must be a list; put the one text into a list.")
    if isinstance(prompts, (bytes, bytearray, dict)) or not isinstance(prompts, Iterable):
        raise InvalidRequest(
            f"prompts must be a list of texts or of lists of token ids, got "
            f"{type(prompts).__name__}."
        )
    return list(prompts)


def _one_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling is None:
        return [SamplingParams()] * count
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if not isinstance(sampling, (list, tuple)) or not all(
        isinstance(params, SamplingParams) for params in sampling
    ):
        raise InvalidRequest(
            "sampling must be a SamplingParams, or a list of one for each prompt.",
            param="sampling",
        )
    if len(sampling) != count:
        raise InvalidRequest(
            f"{len(sampling)} sampling parameters were given for {count} prompts.",
            param="sampling",
        )
    return list(sampling)


def _progress_bar(total: int, show: bool) -> AbstractContextManager[Callable[[], None]]:
    """A context that gives a function to call per finished prompt."""
    if not show:
        return nullcontext(lambda: None)
    return _RichBar(total)


class _RichBar:
    """A rich progress bar on stderr."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

        self._progress = Progress(
            *Progress.get_default_columns()[:2],
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("answers", total=total)

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        return lambda: self._progress.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
