"""Loading needs little more memory than the tensors it keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.model.spec import ModelSpec
from headrace.model.tiny_presets import preset_config
from headrace.model.weight_plan import stored_tensors, weight_plan

MAX_RATIO = 1.15

# Loads everything but the Engram table and reports anonymous memory, sampled all the while.
PROGRAM = """
import json, sys, threading
from pathlib import Path
import torch
from headrace.model.spec import ModelSpec
from headrace.model.weight_plan import weight_plan
from headrace.model.weights import Checkpoint

def anonymous_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

directory = Path(sys.argv[1])
spec = ModelSpec.from_directory(directory)
torch.ones(1000, 1000).sum()
before = peak = anonymous_bytes()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
checkpoint = Checkpoint.open(directory, spec)
kept = []
for plan in weight_plan(spec):
    if plan.kind != "engram":
        kept.append(checkpoint.dequantised(plan.name, torch.bfloat16))
for layer in spec.engram.layers:
    checkpoint.engram_rows(layer).gather(torch.arange(0, 400_000, 70))
done.set()
watcher.join()
kept_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept)
print(json.dumps({"kept": kept_bytes, "grown": peak - before}))
"""


def write_large(directory: Path) -> int:
    """A quantised checkpoint of about 100 MB with arbitrary finite bytes; returns Engram bytes."""
    config: dict[str, Any] = preset_config("tiny-8", quantised=True, compressed_vocab=400)
    config["text_config"] |= {
        "hidden_size": 512,
        "vocab_size": 32_768,
        "moe_intermediate_size": 512,
        "engram_num_embeddings": [400_000],
    }
    (directory / "config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_config(config)
    generator = torch.Generator().manual_seed(0)
    dtypes = {
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "I8": torch.int8,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
    }
    tensors = {}
    for plan in weight_plan(spec):
        for stored in stored_tensors(plan, spec.quant):
            dtype = dtypes[stored.dtype]
            count = torch.Size(stored.shape).numel() * dtype.itemsize
            # The mask leaves no byte pattern that is NaN in any of these formats.
            data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator) & 0x3B
            tensors[stored.name] = data.view(dtype).view(stored.shape)
    save_file(tensors, directory / "model.safetensors")
    table = [t for n, t in tensors.items() if "engram.embed" in n]
    return sum(t.numel() for t in table)


def test_peak_anonymous_memory(tmp_path: Path) -> None:
    table_bytes = write_large(tmp_path)
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    measured = json.loads(completed.stdout)
    assert measured["kept"] > 150e6
    # A table that were read whole (even undequantised) would show.
    assert table_bytes > 0.05 * measured["kept"]
    assert measured["grown"] <= MAX_RATIO * measured["kept"], measured
