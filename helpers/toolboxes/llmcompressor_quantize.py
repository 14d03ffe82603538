"""Runs inside the toolbox ``quant``: llm-compressor quantizes a model folder on given calibration ids and writes a checkpoint.

Input: ``model`` and ``out`` (folders), ``calibration`` (lists of token ids), ``recipe`` (``gptq``, ``awq``, ``rtn``: weights of
``bits`` in groups of ``group_size``; ``smoothquant``: weights and activations in 8 bits), optionally ``symmetric`` (GPTQ and RTN
are symmetric, AWQ is not), ``n_grid`` (AWQ's exponents from 0 to 1) and ``smoothing`` (SmoothQuant's alpha). Output: ``version``,
``seconds`` of the quantization alone, ``bytes``.

What it would do otherwise and does not here: order columns by the size of their inputs (``actorder``, static by default), and
look at the weights' magnitudes in AWQ's search, too (``duo_scaling``). It has no clipping.
"""

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

RECIPES = ("gptq", "awq", "rtn", "smoothquant")


def modifiers(arguments: dict) -> list:
    """llm-compressor's recipe for the settings asked for."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    name, ignore = arguments["recipe"], ["lm_head"]
    if name == "smoothquant":
        from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

        smooth = SmoothQuantModifier(smoothing_strength=arguments.get("smoothing", 0.5))
        return [smooth, QuantizationModifier(scheme="W8A8", targets="Linear", ignore=ignore)]
    weights = QuantizationArgs(
        num_bits=arguments["bits"],
        type="int",
        symmetric=arguments.get("symmetric", name != "awq"),
        strategy="group",
        group_size=arguments["group_size"],
    )
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    if name == "gptq":
        return [GPTQModifier(config_groups=groups, ignore=ignore, dampening_frac=0.01, actorder=None)]
    if name == "awq":
        from llmcompressor.modifiers.transform.awq import AWQModifier

        search = AWQModifier(duo_scaling=False, n_grid=arguments.get("n_grid", 20))
        return [search, QuantizationModifier(config_groups=groups, ignore=ignore)]
    return [QuantizationModifier(config_groups=groups, ignore=ignore)]


def main(arguments: dict) -> dict:
    """Quantize and save."""
    if arguments["recipe"] not in RECIPES:
        raise SystemExit(f"There is no recipe {arguments['recipe']!r}. Known: {', '.join(RECIPES)}.")
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not torch.cuda.is_available():
        torch.Tensor.pin_memory = lambda self, *_, **__: (
            self
        )  # AWQ pins memory even where there is no GPU to copy it to
    tokenizer = AutoTokenizer.from_pretrained(arguments["model"])
    dtype = torch.float32 if not torch.cuda.is_available() else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(arguments["model"], dtype=dtype)
    texts = arguments["calibration"]
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in texts]
    longest = max(len(ids) for ids in texts)
    started = time.monotonic()
    oneshot(
        model=model,
        recipe=modifiers(arguments),
        dataset=Dataset.from_list(rows),
        max_seq_length=longest,
        num_calibration_samples=len(rows),
    )
    seconds = time.monotonic() - started
    model.save_pretrained(arguments["out"], save_compressed=True)
    tokenizer.save_pretrained(arguments["out"])
    n_bytes = sum(file.stat().st_size for file in Path(arguments["out"]).glob("*.safetensors"))
    return {"version": importlib.metadata.version("llmcompressor"), "seconds": seconds, "bytes": n_bytes}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as given:
        output = main(json.load(given))
    with open(sys.argv[2], "w", encoding="utf-8") as result_file:
        json.dump(output, result_file)
