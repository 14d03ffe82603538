"""Runs inside the toolbox ``legacy``: auto-gptq 0.7.1 (archived) quantizes a model folder and writes a checkpoint.

Input: ``model`` and ``out`` (folders), ``calibration`` (lists of token ids), ``bits``, ``group_size``. Output: ``version``,
``seconds`` of the quantization alone, ``bytes``.

auto-gptq has ``cuda:0`` written into it in three places. Without a GPU they are pointed at the CPU, which changes where it
computes and nothing of what it computes.
"""

import contextlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Let auto-gptq run on a CPU: its constants, its calls into torch.cuda, and its refusal to load a model without CUDA."""
    import torch

    if torch.cuda.is_available():
        yield
        return
    import auto_gptq.modeling._base as base
    import auto_gptq.modeling._utils as utils

    base.CUDA_0 = utils.CUDA_0 = torch.device("cpu")
    kept = torch.cuda.synchronize, torch.cuda.empty_cache
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_, **__: None
    try:
        yield
    finally:
        torch.cuda.synchronize, torch.cuda.empty_cache = kept


def main(arguments: dict) -> dict:
    """Quantize and save."""
    import torch
    from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig
    from legacy_model import old_form

    config = BaseQuantizeConfig(
        bits=arguments["bits"], group_size=arguments["group_size"], desc_act=False, sym=True, damp_percent=0.01
    )
    rows = [
        {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        for ids in arguments["calibration"]
    ]
    with tempfile.TemporaryDirectory() as folder, without_gpu():
        source = old_form(arguments["model"], Path(folder) / "model")
        available = torch.cuda.is_available
        torch.cuda.is_available = lambda: True  # it refuses to load otherwise
        try:
            model = AutoGPTQForCausalLM.from_pretrained(source, config, torch_dtype=torch.float32)
        finally:
            torch.cuda.is_available = available
        started = time.monotonic()
        model.quantize(rows, batch_size=1, use_triton=False, cache_examples_on_gpu=False)
        seconds = time.monotonic() - started
        model.save_quantized(arguments["out"], use_safetensors=True)
    n_bytes = sum(file.stat().st_size for file in Path(arguments["out"]).glob("*.safetensors"))
    return {"version": importlib.metadata.version("auto_gptq"), "seconds": seconds, "bytes": n_bytes}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as given:
        output = main(json.load(given))
    with open(sys.argv[2], "w", encoding="utf-8") as result_file:
        json.dump(output, result_file)
