"""Settings of one engine: a frozen value, validated once, where it is built.

Contract: an `EngineConfig` that exists is consistent in itself; what depends on the checkpoint
(does the context fit the model and the memory?) is checked by `engine/capacity.py`. Every
`ConfigError` names the dotted field and the allowed values. Built by `config/load.py`, by the
command line and by users of `LLM`; imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.core.speculation import MAX_DRAFT_LENGTH, Policy
from headrace.errors import ConfigError

ALLOWED_DTYPES = ("float64", "float32", "bfloat16")
WEIGHT_FORMATS = ("stored", "converted")
REPLAY_MODES = ("bounded", "exact", "off")
TRUNCATE_MODES = ("on", "off")
GRAMMAR_BACKENDS = ("llguidance", "xgrammar")
MAX_SEED = 2**64 - 1
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
FLAGS = (
    "kv_quant",
    "act_quant",
    "batch_invariant",
    "deterministic",
    "prefix_cache",
    "jump_forward",
)
OPTIONAL_FLAGS = ("overlap", "graphs")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; None means "derived from the checkpoint and the machine".

    device: where model, cache and sampler are: "cpu", "cuda" (the first card), "cuda:N" or "auto":
    the first card where torch finds one, else the CPU; the CPU also for small models, which it
    answers faster, and if only batch-invariant operators will do, which no card has yet.
    weights: "stored", quantised matrices stay in the checkpoint's format and are decoded while they
    multiply, or "converted" to `dtype`; None: stored on a card in bfloat16 with Triton,
    else converted.
    dtype: None: bfloat16 on a card, else float32.
    dtype, kv_quant, act_quant, batch_invariant: numeric mode, see `ops/numerics.py`. deterministic:
    the same request gives the same tokens, whatever runs beside it and whatever is cached; includes
    batch_invariant, the `gumbel` coupling, exact replay and one seed for all requests without one.
    max_model_len: tokens of prompt and answer together; None: the model's limit, capped by memory.
    max_num_seqs: requests computed at once. max_num_batched_tokens: rows of one step, all requests
    together. kv_memory_bytes (blocks and slots) / num_blocks: size of the KV cache, at most one is
    given; a block holds 128 tokens, block 0 is reserved. max_waiting: requests queued before new
    ones are refused. ageing_steps: steps that a request waits in the queue until nobody may pass
    it. seed: gives requests without a seed theirs; None draws one at start-up (deterministic: 0).
    threads: CPU threads of the operators; None: 1 for models with a hidden size below 1024, else
    the number of physical cores. served_model_name: None: the checkpoint's folder name.

    prefix_cache: whether blocks of earlier prompts are used again. replay: how windows are rebuilt
    after such a hit: "bounded" (one window, an approximation), "exact" (as many rows as make the
    result that of a cold run) or "off" (no hits until window records are stored); None: "exact" if
    deterministic, else "bounded". truncate: whether the layers after the last KV source run on the
    last rows of a prompt only; None: where the model allows it.

    speculation: drafts that a step verifies of a request, "off", "fixed:K" or "adaptive"; None:
    adaptive where the checkpoint has a draft module, else off. draft_length: drafts of a block,
    None: K of "fixed:K", else the checkpoint's block size, which is also the most. overlap: whether
    the next step is planned while one runs; None: not on a CPU, where both would share the cores.
    graphs: whether decode steps are recorded once and replayed; None: on a card, where the chosen
    operators allow it.
    jump_forward: tokens that a grammar forces are computed together, not one a step; changes no
    token.
    grammar_backend: library of structured output: "llguidance" or, if its extra is installed,
    "xgrammar". grammar_cache_bytes: memory for compiled grammars and their masks.
    grammar_cache_dir: where compiled grammars are kept for the next start; only xgrammar's can be,
    None: nowhere. grammar_compile_timeout_s: seconds from its arrival until a request whose grammar
    is still not compiled ends. grammar_threads: grammars compiled at once, besides slow ones.
    """

    device: str = "auto"
    dtype: str | None = None
    weights: str | None = None
    kv_quant: bool = True
    act_quant: bool = False
    batch_invariant: bool = False
    deterministic: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    kv_memory_bytes: int | None = None
    num_blocks: int | None = None
    max_waiting: int = 1024
    ageing_steps: int = 256
    seed: int | None = None
    threads: int | None = None
    served_model_name: str | None = None
    prefix_cache: bool = True
    replay: str | None = None
    truncate: str | None = None
    speculation: str | None = None
    draft_length: int | None = None
    overlap: bool | None = None
    graphs: bool | None = None
    jump_forward: bool = True
    grammar_backend: str = "llguidance"
    grammar_cache_bytes: int = 256 * 2**20
    grammar_cache_dir: str | None = None
    grammar_compile_timeout_s: float = 20.0
    grammar_threads: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"engine.device {self.device!r} is unknown, allowed: auto, cpu, cuda, cuda:N.",
                param="engine.device",
            )
        if self.dtype is not None:
            self._check_choice("dtype", ALLOWED_DTYPES)
        if self.weights is not None:
            self._check_choice("weights", WEIGHT_FORMATS)
        if self.replay is not None:
            self._check_choice("replay", REPLAY_MODES)
        self._check_choice("grammar_backend", GRAMMAR_BACKENDS)
        if self.truncate is not None:
            self._check_choice("truncate", TRUNCATE_MODES)
        if self.speculation is not None:
            Policy.parse(self.speculation)
        for name in (*FLAGS, *OPTIONAL_FLAGS):
            if getattr(self, name) is None and name in OPTIONAL_FLAGS:
                continue
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"engine.{name} must be true or false, got {getattr(self, name)!r}.",
                    param=f"engine.{name}",
                )
        self._check_integer("max_num_seqs", 1, 4096)
        self._check_integer("max_num_batched_tokens", 1, 2**20)
        self._check_integer("max_waiting", 1, 2**20)
        self._check_integer("ageing_steps", 1, 2**31 - 1)
        self._check_integer("max_model_len", 2, 2**24, optional=True)
        self._check_integer("kv_memory_bytes", 1, 2**50, optional=True)
        self._check_integer("num_blocks", 2, 2**31 - 1, optional=True)
        self._check_integer("seed", 0, MAX_SEED, optional=True)
        self._check_integer("threads", 1, 1024, optional=True)
        self._check_integer("draft_length", 1, MAX_DRAFT_LENGTH, optional=True)
        self._check_integer("grammar_cache_bytes", 0, 2**50)
        self._check_integer("grammar_threads", 1, 64)
        self._check_grammar()
        self._check_together()
        self._check_deterministic()

    @property
    def invariant_operators(self) -> bool:
        """Whether only operators will do whose rows have the same bits in every batch."""
        return self.batch_invariant or self.deterministic

    @property
    def replay_mode(self) -> str:
        """`replay`, or what its None stands for."""
        return self.replay or ("exact" if self.deterministic else "bounded")

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigError(
                f"engine.{name} {value!r} is unknown, allowed: {', '.join(allowed)}.",
                param=f"engine.{name}",
            )

    def _check_integer(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        field = f"engine.{name}"
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(
                f"{field} must be an integer in [{low}, {high}], got {value!r}.", param=field
            )

    def _check_grammar(self) -> None:
        timeout_s = self.grammar_compile_timeout_s
        number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
        if not number or not 0.0 < timeout_s <= 3600.0:
            raise ConfigError(
                f"engine.grammar_compile_timeout_s must be in (0, 3600] seconds, got "
                f"{timeout_s!r}.",
                param="engine.grammar_compile_timeout_s",
            )
        directory = self.grammar_cache_dir
        if directory is not None and (not isinstance(directory, str) or not directory):
            raise ConfigError(
                f"engine.grammar_cache_dir must be a path, got {directory!r}.",
                param="engine.grammar_cache_dir",
            )

    def _check_together(self) -> None:
        # A decoding request needs one row in every step: with fewer rows than requests some
        # would never advance.
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"engine.max_num_seqs ({self.max_num_seqs}).",
                param="engine.max_num_batched_tokens",
            )
        if self.kv_memory_bytes is not None and self.num_blocks is not None:
            raise ConfigError(
                "engine.num_blocks and engine.kv_memory_bytes exclude each other: give one.",
                param="engine.num_blocks",
            )
        if self.invariant_operators and self.threads not in (None, 1):
            # How a reduction is split over threads changes its last bits.
            mode = "deterministic" if self.deterministic else "batch_invariant"
            raise ConfigError(
                f"engine.threads must be 1 or unset with engine.{mode}, got {self.threads}.",
                param="engine.threads",
            )
        name = self.served_model_name
        if name is not None and (not isinstance(name, str) or not name.strip() or len(name) > 256):
            raise ConfigError(
                f"engine.served_model_name must be 1 to 256 characters, got {name!r}.",
                param="engine.served_model_name",
            )

    def _check_deterministic(self) -> None:
        if self.deterministic and self.prefix_cache and self.replay == "bounded":
            raise ConfigError(
                'engine.replay "bounded" is an approximation, so a prefix hit would change tokens: '
                'with engine.deterministic leave it out or set "exact" or "off".',
                param="engine.replay",
            )
