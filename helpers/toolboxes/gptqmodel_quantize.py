"""Runs inside the toolbox ``gptqmodel``: GPTQModel quantizes a model folder on given calibration ids and writes a checkpoint.

Input: ``model`` and ``out`` (folders), ``calibration`` (lists of token ids), ``bits``, ``group_size``.
Output: ``version``, ``seconds`` of the quantization alone, ``bytes``. Needs a C++ compiler and ninja for its CPU kernels.
"""

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")


def main(arguments: dict) -> dict:
    """Quantize and save."""
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = QuantizeConfig(
        bits=arguments["bits"],
        group_size=arguments["group_size"],
        desc_act=False,
        act_group_aware=False,  # its default reorders columns
        damp_percent=0.01,
        sym=True,
        device=device,
        offload_to_disk=False,
    )
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in arguments["calibration"]]
    model = GPTQModel.load(arguments["model"], config)
    started = time.monotonic()
    model.quantize(rows, batch_size=1)
    seconds = time.monotonic() - started
    model.save(arguments["out"])
    n_bytes = sum(file.stat().st_size for file in Path(arguments["out"]).glob("*.safetensors"))
    return {"version": importlib.metadata.version("gptqmodel"), "seconds": seconds, "bytes": n_bytes}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as given:
        output = main(json.load(given))
    with open(sys.argv[2], "w", encoding="utf-8") as result_file:
        json.dump(output, result_file)
