"""What a checkpoint is: the facts of config.json as frozen data, without torch.

`ModelSpec.from_directory` / `from_config` parse and validate (see `spec_parse`); every later layer
may trust a spec: sources exist, sizes divide, ids lie in the vocabulary. Differences between V4.1
and V4 are flags here, so that the model code never asks for the architecture by name. Used by the
model, the weight plan, the KV layout (`kv_groups`) and the scheduler (`keep`, `replay_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.core.kv import GroupKind, KVGroupSpec, Movement, RecordFormat

# Replay lengths are whole blocks: the grain at which caches are shared and stored, in tokens.
GRAIN = 128
# Rows kept beyond window + backtrack when the decoder prefill is truncated (released model: 140).
KEEP_SLACK = 6


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """Frequency blending of long-context RoPE; there is no magnitude factor."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Role of one backbone layer.

    ratio: tokens per entry of the compressed cache that the layer reads (0: window only).
    kv_source / index_source / index_key_source: the layers whose compressed KV, selection and index
    keys it reads; None where it has none. compresses / indexes / owns_index_key: whether it has the
    weights for these itself. hash_routing: experts are looked up by token id.
    """

    index: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    index_key_source: int | None
    compresses: bool
    indexes: bool
    owns_index_key: bool
    engram: bool
    hash_routing: bool


@dataclass(frozen=True, slots=True)
class EngramSpec:
    """Gated n-gram memory. num_embeddings: table rows per entry of `layers`.

    vocab_size: where the search for bucket primes starts. heads, head_dim: per n-gram size.
    pad_id: raw token id. compressed_vocab: number of distinct normalised tokens.
    """

    layers: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram: int
    vocab_size: int
    heads: int
    head_dim: int
    pad_id: int
    compressed_vocab: int

    @property
    def columns(self) -> int:
        """Table rows looked up per token: one per n-gram size and head."""
        return (self.max_ngram - 1) * self.heads


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """DSpark draft module. stages: its layers. targets: backbone layers whose streams it reads.

    targets_attn_input: the streams are read at the input of those layers, else at their output.
    confidence_temperatures: what the confidence head's output is divided by before the sigmoid, by
    place in the block; ours, fitted after training (released checkpoints have none: all 1).
    """

    stages: int
    block_size: int
    noise_id: int
    targets: tuple[int, ...]
    targets_attn_input: bool
    markov_rank: int
    num_experts: int
    experts_per_token: int
    confidence_temperatures: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Stored weight formats. weight_block: rows and columns that share one scale.

    act_group: input channels that share one scale when activations are quantised.
    expert_dtype: "fp4" (packed e2m1, one scale per row and 32 inputs) or "fp8" (as other weights).
    """

    weight_block: tuple[int, int]
    act_group: int
    expert_dtype: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything about a model that its config fixes. Sizes are counts, ids are token ids.

    window: tokens each layer sees directly. q_head_norm: per-head RMS norm of queries.
    hc_shifted: a sublayer's `pre` collapses the input of the next one (no head tensors then).
    compress_overlap: ratio-4 groups reach into the group before. use_ape: position bias in the
    compressor. index_key_from_latent: index keys come from the main compressor's output, else the
    indexer has its own compressor. kv_fp4: compressed KV is stored in FP4, else FP8.
    """

    architecture: str
    vocab_size: int
    hidden: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    swiglu_limit: float
    rms_eps: float
    max_position: int
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnSpec | None
    num_experts: int
    num_shared_experts: int
    experts_per_token: int
    moe_inter: int
    routed_scaling: float
    norm_topk_prob: bool
    num_hash_layers: int
    window: int
    layers: tuple[LayerSpec, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_source: int | None
    candidate_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_iters: int
    hc_eps: float
    q_head_norm: bool
    hc_shifted: bool
    compress_overlap: bool
    use_ape: bool
    index_hadamard: bool
    index_key_from_latent: bool
    engram: EngramSpec | None
    draft: DraftSpec | None
    quant: QuantSpec | None
    bos_id: int
    eos_id: int
    pad_id: int
    image_id: int | None
    kv_fp4: bool
    vision_layers: int

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelSpec:
        """Parse a decoded config.json. Raises ModelConfigError whose `param` names the field."""
        from headrace.model.spec_parse import parse_config

        return parse_config(config)

    @classmethod
    def from_directory(cls, directory: Path | str) -> ModelSpec:
        """Parse `directory`/config.json. Raises CheckpointError (no file), ModelConfigError."""
        from headrace.model.spec_parse import read_config

        return cls.from_config(read_config(Path(directory)))

    # --- roles of layers -----------------------------------------------------------------------

    @property
    def has_vision_bias(self) -> bool:
        """Whether routers also have a selection bias for image tokens."""
        return self.vision_layers > 0

    @property
    def n_prefill_layer(self) -> int:
        """First consumer layer (the first of ratio 1); `num_layers` where there is none (V4)."""
        return next((layer.index for layer in self.layers if layer.ratio == 1), self.num_layers)

    @property
    def default_backtrack(self) -> int:
        """Tokens that one step may have to take back: every draft and the row before them."""
        return self.draft.block_size + 1 if self.draft is not None else 1

    def overlaps(self, ratio: int) -> bool:
        """Whether groups of this ratio also pool over the group before (V4, ratio 4)."""
        return self.compress_overlap and ratio == 4

    def compressor_width(self, ratio: int, dim: int) -> int:
        """Channels of a compressor's kv (and score) rows: two halves where groups overlap."""
        return 2 * dim if self.overlaps(ratio) else dim

    def truncation_refusal(self) -> str | None:
        """Why the decoder prefill cannot be truncated for this model; None where it can.

        Consumers may need nothing of dropped rows but the boundary layer's entries and index keys.
        """
        border = self.n_prefill_layer
        if border == self.num_layers:
            return "no layer of ratio 1 parts producers from consumers"
        if not (self.layers[border].compresses and self.layers[border].indexes):
            return f"layer {border}, the first of ratio 1, is no KV and index source itself"
        if any(x.compresses or x.engram for x in self.layers[border + 1 :]):
            return f"a layer after {border} has entries or an Engram table of its own"
        if self.layers[border].engram:
            return f"layer {border} has an Engram table"
        if self.draft is not None and len({target < border for target in self.draft.targets}) > 1:
            return f"the draft's target layers lie on both sides of layer {border}"
        return None

    def replay_refusal(self) -> str | None:
        """Why windows cannot be rebuilt after a prefix hit; None where they can.

        The compressor starts empty at the hit, which must therefore end all groups.
        """
        for layer in self.layers:
            if layer.compresses and self.overlaps(layer.ratio):
                return f"groups of ratio {layer.ratio} overlap, their state is not stored"
            if layer.compresses and GRAIN % layer.ratio:
                return f"{GRAIN} is no multiple of ratio {layer.ratio}"
        return None

    # --- replay and truncation (formulas of the window) ------------------------------------------

    def replay_layers(self, truncate: bool) -> int:
        """Layers recomputed through their windows on a prefix hit."""
        return self.n_prefill_layer if truncate else self.num_layers

    def keep(self, truncate: bool) -> int:
        """Last rows of a prompt that run through every layer."""
        return self.window + self.default_backtrack + KEEP_SLACK if truncate else 1

    def replay_rows(self, mode: str, truncate: bool) -> int:
        """Rows to recompute before a hit: `bounded` approximates, `exact` equals a cold run.

        `exact` is rounded up to whole grains of 128 tokens. Raises ValueError for other modes.
        """
        if mode == "bounded":
            return self.window
        if mode == "exact":
            rows = self.window + (self.replay_layers(truncate) - 1) * (self.window - 1)
            return -(-rows // GRAIN) * GRAIN
        raise ValueError(f"replay mode {mode!r} is neither 'bounded' nor 'exact'")

    # --- cache rows ----------------------------------------------------------------------------

    def kv_groups(self, kv_quant: bool, backtrack: int | None = None) -> tuple[KVGroupSpec, ...]:
        """Cache groups of the model: paged first, then rings, then compressor states.

        kv_quant: released record formats, else PLAIN. backtrack: tokens that can be taken back
        (default: as the draft module needs); it lengthens rings and states.
        """
        back = self.default_backtrack if backtrack is None else backtrack
        groups = [*self._paged_groups(kv_quant), *self._ring_groups(kv_quant, back)]
        groups += self._state_groups(back)
        return tuple(group for group in groups if group.layers)

    def global_kv_bytes_per_token(self) -> float:
        """Bytes per token of all paged groups in the released formats (padding not counted)."""
        groups = self._paged_groups(kv_quant=True)
        return sum(len(g.layers) * g.bytes_per_row / g.ratio for g in groups)

    def _ratios(self) -> list[int]:
        return sorted({layer.ratio for layer in self.layers if layer.compresses})

    def _compressing(self, ratio: int) -> tuple[int, ...]:
        return tuple(x.index for x in self.layers if x.compresses and x.ratio == ratio)

    def _indexed(self, ratio: int) -> tuple[int, ...]:
        return tuple(x.index for x in self.layers if x.owns_index_key and x.ratio == ratio)

    def _formats(self, kv_quant: bool) -> tuple[RecordFormat, RecordFormat, RecordFormat]:
        """Formats of compressed KV, index keys and window rows."""
        if not kv_quant:
            return RecordFormat.PLAIN, RecordFormat.PLAIN, RecordFormat.PLAIN
        index = RecordFormat.FP4_UE8M0_32
        if not self.index_key_from_latent:
            return RecordFormat.FP8_NOPE_64, index, RecordFormat.FP8_NOPE_64
        main = RecordFormat.FP4_E4M3_16 if self.kv_fp4 else RecordFormat.FP8_UE8M0_32
        return main, index, RecordFormat.FP8_UE8M0_32

    def _rope_width(self, record: RecordFormat) -> int:
        return self.rope_dim if record is RecordFormat.FP8_NOPE_64 else 0

    def _paged_groups(self, kv_quant: bool) -> list[KVGroupSpec]:
        main_format, index_format, _ = self._formats(kv_quant)
        main = [
            KVGroupSpec(
                name=f"main_c{ratio}",
                kind=GroupKind.PAGED,
                layers=self._compressing(ratio),
                width=self.head_dim,
                format=main_format,
                ratio=ratio,
                rope_width=self._rope_width(main_format),
                movement=Movement.PERSIST,
            )
            for ratio in self._ratios()
        ]
        index = [
            KVGroupSpec(
                name=f"index_c{ratio}",
                kind=GroupKind.PAGED,
                layers=self._indexed(ratio),
                width=self.index_dim,
                format=index_format,
                ratio=ratio,
                movement=Movement.PERSIST,
            )
            for ratio in self._ratios()
        ]
        return [group for group in (*main, *index) if group.layers]

    def _ring_groups(self, kv_quant: bool, backtrack: int) -> list[KVGroupSpec]:
        record = self._formats(kv_quant)[2]

        def ring(name: str, layers: range, movement: Movement) -> KVGroupSpec:
            return KVGroupSpec(
                name=name,
                kind=GroupKind.RING,
                layers=tuple(layers),
                width=self.head_dim,
                format=record,
                rows=self.window + backtrack,
                window=self.window,
                rope_width=self._rope_width(record),
                movement=movement,
            )

        if not self.index_key_from_latent:
            return [ring("window", range(self.num_layers), Movement.PERSIST)]
        border = self.n_prefill_layer
        stages = self.draft.stages if self.draft is not None else 0
        return [
            ring("window_producer", range(border), Movement.PERSIST),
            ring("window_consumer", range(border, self.num_layers), Movement.HANDOFF),
            ring("window_draft", range(stages), Movement.HANDOFF),
        ]

    def _state_groups(self, backtrack: int) -> list[KVGroupSpec]:
        def state(name: str, layers: tuple[int, ...], ratio: int, dim: int) -> KVGroupSpec:
            # An overlapped group also reads the one before it; kv and score lie side by side.
            reach = 2 * ratio if self.overlaps(ratio) else ratio
            return KVGroupSpec(
                name=name,
                kind=GroupKind.STATE,
                layers=layers,
                width=2 * self.compressor_width(ratio, dim),
                format=RecordFormat.PLAIN,
                rows=reach + backtrack - 1,
            )

        groups = []
        for ratio in self._ratios():
            if ratio == 1:
                continue  # an entry per token: nothing stays open between steps
            groups.append(
                state(f"compressor_c{ratio}", self._compressing(ratio), ratio, self.head_dim)
            )
            if not self.index_key_from_latent:
                name = f"index_compressor_c{ratio}"
                groups.append(state(name, self._indexed(ratio), ratio, self.index_dim))
        return groups
