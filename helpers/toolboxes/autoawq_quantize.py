"""Runs inside the toolbox ``legacy``: AutoAWQ 0.2.9 (archived) quantizes a model folder and writes a checkpoint.

Input: ``model`` and ``out`` (folders), ``calibration`` (lists of token ids), ``bits``, ``group_size``, ``mended``. Output:
``version``, ``seconds`` of the quantization alone, ``bytes``.

As released, AutoAWQ ends on a CPU without any error and writes garbage: its scale search remembers weights as ``weight.cpu()``,
which on a CPU is the weight itself. The first trial multiplies that in place, so its scales get into what is remembered, and
after each trial the weights are put back with them in. Later trials move to storage of their own and leave no trace. With duo
scaling, its default, the first scales are about 1 over the mean magnitude of the weights, not 1. ``mended`` gives it copies.

Defaults are kept: duo scaling, 20 exponents, clipping.
"""

import importlib.metadata
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))


def remember_copies() -> None:
    """Make the scale search see copies wherever it asks a module for its state."""
    from awq.quantize.quantizer import AwqQuantizer

    search = AwqQuantizer._compute_best_scale

    def mended(self: Any, x: Any, w_mean: Any, x_mean: Any, module: Any, *arguments: Any, **options: Any) -> Any:
        state_dict = module.state_dict
        module.state_dict = lambda *a, **k: {name: tensor.clone() for name, tensor in state_dict(*a, **k).items()}
        try:
            return search(self, x, w_mean, x_mean, module, *arguments, **options)
        finally:
            del module.state_dict

    AwqQuantizer._compute_best_scale = mended


def main(arguments: dict) -> dict:
    """Quantize and save."""
    import torch
    from awq import AutoAWQForCausalLM
    from legacy_model import old_form
    from transformers import AutoTokenizer

    if arguments["mended"]:
        remember_copies()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {
        "zero_point": True,
        "q_group_size": arguments["group_size"],
        "w_bit": arguments["bits"],
        "version": "GEMM",
    }
    with tempfile.TemporaryDirectory() as folder:
        source = old_form(arguments["model"], Path(folder) / "model")
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoAWQForCausalLM.from_pretrained(source, device_map=device, torch_dtype=torch.float32)
        texts = arguments["calibration"]
        longest = max(len(ids) for ids in texts)
        started = time.monotonic()
        model.quantize(
            tokenizer,
            quant_config=settings,
            calib_data=texts,
            max_calib_samples=len(texts),
            max_calib_seq_len=longest,
        )
        seconds = time.monotonic() - started
        model.save_quantized(arguments["out"])
    n_bytes = sum(file.stat().st_size for file in Path(arguments["out"]).glob("*.safetensors"))
    return {"version": importlib.metadata.version("autoawq"), "seconds": seconds, "bytes": n_bytes}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as given:
        output = main(json.load(given))
    with open(sys.argv[2], "w", encoding="utf-8") as result_file:
        json.dump(output, result_file)
