"""The bundled draft model: a few trained layers in ``data/draft`` that borrow everything else from the bundled model.

The draft is a Llama of five layers with the target's tokenizer, embeddings and (tied) output head. Only its layers and its
last norm are stored; `assemble` puts a checkpoint together that Transformers and vLLM load like any other. How it was
trained, and what it reached, is in ``data/draft/README.md``; ``python3 -m helpers train-draft`` trains it anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from helpers.corpora import data_file, registry
from helpers.errors import ModelError

WEIGHTS = "draft/draft.safetensors"
CONFIG = "draft/config.json"
BORROWED = "model.embed_tokens.weight"
"""The one tensor that the draft takes from the target: the embeddings, which are the output head too."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def digest() -> str:
    """The sha256 of what the draft is made of: the registered sums of its weights and of its configuration."""
    sums = registry()
    return hashlib.sha256(f"{sums.get(WEIGHTS)} {sums.get(CONFIG)}".encode()).hexdigest()


def draft_config(target: dict[str, Any], n_layers: int) -> dict[str, Any]:
    """The target's configuration (as read from its config.json) with `n_layers` layers."""
    config = {**target, "num_hidden_layers": n_layers, "tie_word_embeddings": True}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:n_layers]
    return config


def assemble(target: Path, folder: Path) -> None:
    """Write the draft as a complete checkpoint (weights, configuration, tokenizer) into `folder`.

    Parameters
    ----------
    target : folder of the target model's checkpoint, whose embeddings and tokenizer are borrowed.

    Raises
    ------
    DataError : a file of ``data/draft`` is missing or altered.
    ModelError : the target has no embeddings of the draft's width.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    own = load_file(data_file(WEIGHTS))
    text = data_file(CONFIG).read_text(encoding="utf-8")
    wanted = json.loads(text)
    embeddings = None
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if BORROWED in tensors.keys():  # noqa: SIM118  (not a dict)
                embeddings = tensors.get_tensor(BORROWED)
    expected = [wanted["vocab_size"], wanted["hidden_size"]]
    if embeddings is None or list(embeddings.shape) != expected:
        found = "none" if embeddings is None else list(embeddings.shape)
        raise ModelError(
            f"The draft needs embeddings of shape {expected}; the target in {target} has {found}.",
            "Give the model that the draft was trained for.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**own, BORROWED: embeddings}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(text, encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, folder / name)
