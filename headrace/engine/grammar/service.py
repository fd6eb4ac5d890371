"""Structured output of one engine: what `engine/engine.py` calls, in the order of a request.

Contract: `check` (the request may be refused), `open` (its grammar is compiled beside the loop;
until `settle` names it, the request waits in the scheduler's queue), then, by table row, `admit`,
`masks`, `commit`, `release` as in `rows.py`. A grammar that cannot be compiled ends its request
only. Nothing is started before the first engine with a vocabulary is built. No torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from headrace.config import EngineConfig
from headrace.core.grammar import GrammarSpec
from headrace.core.protocols import Vocabulary
from headrace.engine.grammar.backend import GrammarBackend, TokenTable
from headrace.engine.grammar.compiler import GrammarCompiler, GrammarTicket
from headrace.engine.grammar.disk import GrammarDirectory
from headrace.engine.grammar.rows import GrammarRows
from headrace.errors import ConfigError, HeadraceError, InvalidRequest

# The event of `NewRequest.waits_for`.
GRAMMAR_EVENT = "grammar"


class GrammarService:
    """Compiler and rows of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: object,
        *,
        vocab_size: int,
        eos_id: int,
        clock: Callable[[], float],
    ) -> None:
        """tokenizer: a `Vocabulary`; with anything else requests with a grammar are refused.

        Raises ConfigError when the backend of the config is not installed.
        """
        self._vocab_size = vocab_size
        self._compiler: GrammarCompiler | None = None
        self.rows = GrammarRows(vocab_size)
        self._waiting: dict[str, GrammarTicket] = {}
        make_backend = _backend(config.grammar_backend)
        if isinstance(tokenizer, Vocabulary):
            vocabulary = tokenizer
            directory = config.grammar_cache_dir
            self._compiler = GrammarCompiler(
                lambda: TokenTable.of(vocabulary, vocab_size, eos_id),
                make_backend,
                clock=clock,
                cache_bytes=config.grammar_cache_bytes,
                timeout_s=config.grammar_compile_timeout_s,
                threads=config.grammar_threads,
                directory=None if directory is None else GrammarDirectory(Path(directory)),
            )

    def check(self, spec: GrammarSpec | None) -> None:
        """Raise what is known to be wrong with a grammar here; nothing is compiled."""
        if spec is None:
            return
        if self._compiler is None:
            raise InvalidRequest(
                "A grammar needs an engine with the checkpoint's tokenizer: build the LLM with "
                "tokenizer=Tokenizer.from_directory(...).",
                param="grammar",
            )
        self._compiler.check(spec.kind, spec.text)
        ids = (*spec.trigger_token_ids, spec.bound_token_id or 0)
        if max(ids) >= self._vocab_size:
            raise InvalidRequest(
                f"The grammar's trigger holds token {max(ids)}, allowed are 0 to "
                f"{self._vocab_size - 1}.",
                param="grammar",
            )

    def open(self, spec: GrammarSpec | None) -> GrammarTicket | None:
        """The claim of a checked request. Raises InvalidGrammar or Overloaded, known at once."""
        if spec is None or self._compiler is None:
            return None
        return self._compiler.open(spec.kind, spec.text)

    def hold(self, request_id: str, ticket: GrammarTicket) -> None:
        """The request waits in the scheduler until `settle` names it."""
        self._waiting[request_id] = ticket

    def drop(self, request_id: str) -> None:
        """The request has ended; an unknown id is ignored."""
        ticket = self._waiting.pop(request_id, None)
        if ticket is not None and self._compiler is not None:
            self._compiler.close(ticket)

    def settle(self, timeout_s: float = 0.0) -> list[tuple[str, HeadraceError | None]]:
        """Requests that wait no longer, and why they cannot run; waits if there are none yet."""
        if not self._waiting or self._compiler is None:
            return []
        if timeout_s:
            self._compiler.wait(timeout_s)
        self._compiler.settle()
        ended = [(name, ticket) for name, ticket in self._waiting.items() if ticket.done]
        for name, _ in ended:
            del self._waiting[name]
        return [(name, ticket.error) for name, ticket in ended]


def _backend(name: str) -> Callable[[TokenTable], GrammarBackend]:
    """The class of a backend; its library is imported when it is first used."""
    if name == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
        raise ConfigError(
            "engine.grammar_backend xgrammar is not installed: pip install 'headrace[xgrammar]', "
            "or use llguidance.",
            param="engine.grammar_backend",
        )

    def make(table: TokenTable) -> GrammarBackend:
        if name == "xgrammar":
            from headrace.engine.grammar.xgrammar_backend import XgrammarBackend

            return XgrammarBackend(table)
        from headrace.engine.grammar.llguidance_backend import LlguidanceBackend

        return LlguidanceBackend(table)

    return make
