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
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from headrace.config import EngineConfig
from headrace.core.output import FinishReason, RequestOutput, TokenChunk
from headrace.core.plain import is_huge, plain_ids
from headrace.core.protocols import Detokenizer, Tokenizer
from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.load import ProgressCallback, load_engine
from headrace.errors import HeadraceError, InvalidRequest, Overloaded

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of a streamed answer: new text and the ids of the step, EOS included.

    The last one has `finish`; `error` says what went wrong when that is ERROR.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class _Answer:
    """What has come in of one request."""

    request: Request
    detokenizer: Detokenizer | None
    inbox: deque[TokenChunk] = field(default_factory=deque)
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None

    def take(self, chunk: TokenChunk) -> TextChunk:
        """Add a chunk; its text leaves out the token that ended the answer."""
        self.token_ids += chunk.tokens
        self.finish, self.error = chunk.finish, chunk.error
        text = ""
        if self.detokenizer is not None:
            shown = chunk.tokens[:-1] if chunk.finish is FinishReason.STOP else chunk.tokens
            text = self.detokenizer.push(shown)
            if chunk.finish is not None:
                text += self.detokenizer.flush()
        self.text.append(text)
        return TextChunk(text, chunk.tokens, chunk.finish, chunk.error)

    def output(self) -> RequestOutput:
        """The finished answer."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            text="".join(self.text),
            finish=self.finish or FinishReason.ABORT,
            error=self.error,
        )


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
        engine = load_engine(Path(checkpoint), config or EngineConfig(), progress=progress)
        self._set_up(engine, tokenizer)

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer | None = None) -> LLM:
        """An LLM over an engine that is already there."""
        llm = cls.__new__(cls)
        llm._set_up(engine, tokenizer)
        return llm

    def _set_up(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine: Engine | None = engine
        self._tokenizer = tokenizer
        self._answers: dict[str, _Answer] = {}
        self._numbered = 0
        self._busy = threading.Lock()
        self._dropped: deque[_Answer] = deque()  # streams that were closed while it was busy

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
        """Answer all prompts; outputs are in the order of the prompts.

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
            running: list[_Answer] = []
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
        return [answer.output() for answer in answers]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[TextChunk]:
        """Yield an answer as it grows, at least one chunk. Closing the iterator aborts it.

        Raises InvalidRequest, ContextTooLong or Overloaded at the first `next`.
        """
        with self._alone():
            answer = self._answer(prompt, _one_each(sampling, 1)[0], None)
            self._submit(answer)
        try:
            while answer.finish is None:
                if not answer.inbox:
                    with self._alone():
                        self._pump()
                while answer.inbox:
                    yield answer.take(answer.inbox.popleft())
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

    def _answer(self, prompt: Prompt, params: SamplingParams, number: int | None) -> _Answer:
        """Build and check a request; errors name the prompt by `number`."""
        try:
            request = Request(f"llm-{self._numbered}", self._prompt_ids(prompt), params)
            self.engine.check(request)
        except InvalidRequest as error:
            if number is None:
                raise
            raise type(error)(f"prompt {number}: {error.message}", param=error.param) from error
        self._numbered += 1
        detokenizer = self._tokenizer.detokenizer() if self._tokenizer is not None else None
        return _Answer(request, detokenizer)

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

    def _submit(self, answer: _Answer) -> None:
        self.engine.add(answer.request)
        self._answers[answer.request.request_id] = answer

    def _submit_some(self, waiting: deque[_Answer], running: list[_Answer]) -> None:
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

    def _collect(self, answer: _Answer, advance: Callable[[], None]) -> bool:
        """Take what has come in; True when the answer is complete."""
        while answer.inbox:
            answer.take(answer.inbox.popleft())
        if answer.finish is None:
            return False
        del self._answers[answer.request.request_id]
        advance()
        return True

    def _forget(self, answers: list[_Answer]) -> None:
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
