"""Record what the embedded model answers: tests/golden/tiny.

    python scripts/record_tiny.py

Run it whenever the weights in headrace/assets/tiny change. `SHA256SUMS` are the files of the
checkpoint; `greedy.json` holds one prompt of eight task families with its greedy answer, fp32 as it
is served; `logits.npz` the logits behind the last token of some of these prompts, in fp64 without
rounded cache rows, stored as fp32.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.assets import embedded_model
from headrace.config import EngineConfig
from headrace.core.sampling import SamplingParams
from headrace.engine.llm import LLM
from headrace.eval.families import draw
from headrace.eval.items import FIRST_TEST_SEED, Draw
from headrace.kv.cache import KVCache
from headrace.kv.layout import BLOCK_TOKENS
from headrace.model.batch import Batch, BatchRow
from headrace.model.loader import load_model
from headrace.ops.numerics import Numerics
from headrace.recipe import Codec

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden" / "tiny"
FAMILIES = (
    "tools",
    "json",
    "arithmetic",
    "sorting",
    "counting",
    "copying",
    "recall",
    "followups",
)
# Prompts whose logits are kept: 32 KB each.
LOGITS_OF = ("tools", "arithmetic", "recall")
MAX_TOKENS = 160
SUMMED = ("config.json", "tokenizer.json", "model.safetensors.index.json", "*.safetensors")


def sums(folder: Path) -> str:
    """SHA-256 of the checkpoint's files, as `sha256sum` prints them."""
    files = sorted(path for pattern in SUMMED for path in folder.glob(pattern))
    return "".join(f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files)


def prompts(codec: Codec) -> list[dict[str, Any]]:
    """One prompt of each family, thinking in every second one."""
    found = []
    for number, family in enumerate(FAMILIES):
        item = draw(family, FIRST_TEST_SEED, Draw(thinking=number % 2 == 0, tokens=600))[0]
        found.append({"family": family, "prompt": codec.encode(item.conversation)})
    return found


def last_logits(folder: Path, prompt: list[int], numerics: Numerics) -> np.ndarray[Any, Any]:
    """Logits behind the last token of a prompt, computed in one step."""
    model = load_model(folder, numerics)
    blocks = -(-len(prompt) // BLOCK_TOKENS)
    cache = KVCache(
        model.kv_groups(), num_blocks=blocks + 1, num_slots=2, dtype=numerics.torch_dtype
    )
    row = BatchRow(np.array(prompt, np.int64), 0, len(prompt), list(range(1, blocks + 1)), 1)
    with torch.inference_mode():
        logits = model.forward(Batch.build([row], model.max_ngram), cache)
    return np.asarray(logits[-1].numpy(), np.float32)


def main() -> int:
    """Write the three files."""
    torch.set_num_threads(1)
    folder = embedded_model()
    cases = prompts(Codec.from_directory(folder))
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with LLM(folder, EngineConfig(threads=1, max_model_len=2048)) as llm:
        outputs = llm.generate([case["prompt"] for case in cases], greedy)
    for case, output in zip(cases, outputs, strict=True):
        case["answer"] = list(output.token_ids)
    rows: dict[str, Any] = {
        case["family"]: last_logits(folder, case["prompt"], Numerics("float64", kv_quant=False))
        for case in cases
        if case["family"] in LOGITS_OF
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "SHA256SUMS").write_text(sums(folder), encoding="utf-8")
    lines = ",\n".join(json.dumps(case) for case in cases)
    (FOLDER / "greedy.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    np.savez_compressed(FOLDER / "logits.npz", **rows)
    codec = Codec.from_directory(folder)
    for case in cases:
        print(case["family"], repr(codec.tokenizer.decode(case["answer"], skip_special=False)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
