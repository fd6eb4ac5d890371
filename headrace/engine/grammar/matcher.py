"""One answer on its way through trigger and grammar.

Contract: `accept(token)` goes on by a token or says that it is not allowed, `rollback(count)` takes
the newest tokens back exactly (at most MAX_ROLLBACK), `mask()` is what may come next, None:
everything. Before the trigger is complete everything may come (once bound, only the rest of the
trigger), but EOS only if the grammar is not required; in the grammar EOS is allowed where it may
end, and after it only EOS is. The library's matcher is made and moved only when a state is new to
the graph. Used by one thread at a time.
"""

from __future__ import annotations

from array import array
from collections import deque

from headrace.core.grammar import GrammarSpec
from headrace.engine.grammar.backend import BackendMatcher, MaskWords, MatcherFailed
from headrace.engine.grammar.states import NOT_FORCED, State, StateGraph, only
from headrace.engine.grammar.trigger import Trigger
from headrace.errors import InternalError

# More than all drafts and all steps in flight together.
MAX_ROLLBACK = 256


class Matcher:
    """A `GrammarSpec` followed token by token."""

    def __init__(self, spec: GrammarSpec, graph: StateGraph) -> None:
        self._graph = graph
        self._trigger: Trigger | None = None
        if spec.trigger_token_ids:
            self._trigger = Trigger(spec.trigger_token_ids, spec.bound_token_id)
        # A trigger that holds EOS could never come without it.
        self._eos_waits = spec.required and graph.end.forced not in spec.trigger_token_ids
        # Of the trigger, after each of the newest tokens before the grammar.
        self._progress = deque([(0, False)], MAX_ROLLBACK + 1)
        self._tokens = array("i")  # accepted inside the grammar
        # After each of the newest of them, the one before included; empty before the grammar.
        self._states: deque[State] = deque([] if self._trigger else [graph.root], MAX_ROLLBACK + 1)
        self._backend: BackendMatcher | None = None
        self._backend_tokens = 0  # how many of `_tokens` the library's matcher has accepted

    def mask(self) -> MaskWords | None:
        """Tokens that may come next, read-only int32 [ceil(vocab / 32)]; None: all."""
        if self._states:
            return self._states[-1].mask
        token = self.forced()
        if token != NOT_FORCED:
            return only(token, self._graph.num_words)
        return self._graph.all_but_eos if self._eos_waits else None

    def forced(self) -> int:
        """The only token that may come next, or NOT_FORCED."""
        if self._states:
            return self._states[-1].forced
        progress, bound = self._progress[-1]
        return self._trigger.token(progress) if bound and self._trigger else NOT_FORCED

    @property
    def ended(self) -> bool:
        """Whether EOS was accepted."""
        return bool(self._states) and self._states[-1] is self._graph.end

    def accept(self, token: int) -> bool:
        """Go on by a token; False, and nothing changes, where it is not allowed.

        Raises MatcherFailed at a limit of the library; nothing has changed then either.
        """
        if not self._states:
            return self._accept_before(token)
        state = self._states[-1]
        following = state.following.get(token)
        if following is None:
            if not state.allows(token):
                return False
            following = self._new_state(state, token)
        self._tokens.append(token)
        self._states.append(following)
        return True

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back. Raises InternalError beyond the history."""
        inside = min(count, len(self._tokens))
        before = count - inside
        if inside > max(0, len(self._states) - 1) or before > len(self._progress) - 1:
            raise InternalError(f"{count} tokens of a grammar cannot be taken back.")
        if inside:
            del self._tokens[-inside:]
            for _ in range(inside):
                self._states.pop()
            if self._backend is not None and self._backend_tokens > len(self._tokens):
                self._backend.rollback(self._backend_tokens - len(self._tokens))
                self._backend_tokens = len(self._tokens)
        if before:
            self._states.clear()
            for _ in range(before):
                self._progress.pop()

    def _accept_before(self, token: int) -> bool:
        """A token outside the grammar."""
        if self._trigger is None or self.forced() not in (NOT_FORCED, token):
            return False
        if self._eos_waits and token == self._graph.end.forced:
            return False
        progress, bound = self._trigger.after(*self._progress[-1], token)
        self._progress.append((progress, bound))
        if progress == len(self._trigger):
            self._states.append(self._graph.root)
        return True

    def _new_state(self, state: State, token: int) -> State:
        """The state after an allowed token that has not been seen there."""
        if token == self._graph.end.forced:
            state.following[token] = self._graph.end
            return self._graph.end
        self._tokens.append(token)
        try:
            return self._graph.after(state, token, self._synced)
        except MatcherFailed:
            # Of no use any more; another one catches up if the answer goes on elsewhere.
            self._backend, self._backend_tokens = None, 0
            raise
        finally:
            self._tokens.pop()

    def _synced(self) -> BackendMatcher:
        """The library's matcher after all of `_tokens`, of which none is EOS here."""
        if self._backend is None:
            self._backend = self._graph.matcher()
        self._backend.accept(self._tokens[self._backend_tokens :])
        self._backend_tokens = len(self._tokens)
        return self._backend
