"""Runs inside the toolbox ``quant``: perplexity of a model quantized to int8 by the maintained libraries.

Input: ``model`` (folder), ``methods`` (names below), ``evaluation`` (token ids), ``calibration`` (lists of token ids), ``window``
(tokens), ``alpha`` (SmoothQuant), ``threads``. Output: ``rows``, for each method its ``version``, ``perplexity``, ``seconds``
and, where it failed, the ``error`` in one line. Perplexity: token level, windows
without overlap, a window's first token not scored.
"""

import importlib.metadata
import json
import math
import os
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")


def load(arguments: dict, **options: object) -> Any:
    """The model in float32 (or as `options` say), in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(arguments["model"], **{"dtype": torch.float32, **options}).eval()


def perplexity(model: Any, ids: list[int], window: int) -> float:
    """Token-level perplexity over whole windows."""
    import torch

    total, count = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(ids) - window + 1, window):
            chunk = torch.tensor(ids[start : start + window], device=model.device)[None]
            logits = model(chunk, use_cache=False).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, chunk[0, 1:], reduction="sum"))
            count += window - 1
    return math.exp(total / count)


def llm_compressor(arguments: dict) -> tuple[Any, str]:
    """SmoothQuant, then W8A8: weights by output channel, inputs by token at run time."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    try:
        from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    except ImportError:
        from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
    if not torch.cuda.is_available():  # memory is pinned without asking whether there is a GPU
        torch.Tensor.pin_memory = lambda self, *_, **__: self
    model = load(arguments)
    texts = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in arguments["calibration"]]
    recipe = [
        SmoothQuantModifier(smoothing_strength=arguments["alpha"]),
        QuantizationModifier(scheme="W8A8", targets="Linear", ignore=["lm_head"]),
    ]
    longest = max(len(ids) for ids in arguments["calibration"])
    oneshot(
        model=model,
        recipe=recipe,
        dataset=Dataset.from_list(texts),
        max_seq_length=longest,
        num_calibration_samples=len(texts),
    )
    return model, "llmcompressor"


def torchao(arguments: dict) -> tuple[Any, str]:
    """Int8 weights by output channel, int8 inputs by token at run time."""
    from torch import nn
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = load(arguments)
    quantize_(
        model,
        Int8DynamicActivationInt8WeightConfig(),
        filter_fn=lambda layer, name: isinstance(layer, nn.Linear) and "lm_head" not in name,
    )
    return model, "torchao"


def bitsandbytes(arguments: dict) -> tuple[Any, str]:
    """LLM.int8() with its threshold of 6."""
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=6.0, llm_int8_skip_modules=["lm_head"])
    return load(arguments, quantization_config=settings), "bitsandbytes"


METHODS = {
    "llm-compressor SmoothQuant W8A8": llm_compressor,
    "torchao int8 dynamic": torchao,
    "bitsandbytes LLM.int8()": bitsandbytes,
}


def main(arguments: dict) -> dict:
    """Quantize and judge with each method; a library that fails leaves its error in its row."""
    import torch

    torch.set_num_threads(arguments["threads"])
    rows = []
    for name in arguments["methods"]:
        row: dict = {"method": name, "version": "", "perplexity": None, "seconds": None, "error": ""}
        started = time.monotonic()
        try:
            model, package = METHODS[name](arguments)
            row["version"] = importlib.metadata.version(package)
            row["perplexity"] = perplexity(model, arguments["evaluation"], arguments["window"])
            del model
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        row["seconds"] = time.monotonic() - started
        rows.append(row)
    return {"rows": rows}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as given:
        output = main(json.load(given))
    with open(sys.argv[2], "w", encoding="utf-8") as result_file:
        json.dump(output, result_file)
