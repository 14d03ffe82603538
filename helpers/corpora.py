"""Texts that the course measures on. All lie in ``data/`` with licence and source in ``data/README.md``, checked by hash."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pooch
from pydantic import BaseModel, ConfigDict

from helpers.errors import DataError
from helpers.paths import DATA

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Split = Literal["calibration", "evaluation"]


class ChatPrompt(BaseModel):
    """One user turn. `kind` is the sort of task: explain, plan, write, rewrite, maths, code, fact or compare."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    kind: str
    text: str


@cache
def registry() -> dict[str, str]:
    """File name to sha256, from ``data/registry.txt``."""
    lines = (DATA / "registry.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split() for line in lines if line.strip())  # type: ignore[misc]


def data_file(name: str) -> Path:
    """The path of a file in ``data/``, after checking its sha256.

    Raises
    ------
    DataError : the file is missing, unregistered or altered.
    """
    path = DATA / name
    if name not in registry():
        raise DataError(
            f"data/{name} is not in data/registry.txt.", "Add its sha256 there, and its source to data/README.md."
        )
    if not path.is_file():
        raise DataError(f"data/{name} is missing.", "Restore it from the repository (git checkout -- data).")
    if pooch.file_hash(str(path), alg="sha256") != registry()[name]:
        raise DataError(
            f"data/{name} is not the file that was registered: its sha256 differs.",
            "Restore it from the repository (git checkout -- data).",
        )
    return path


def prose(split: Split) -> str:
    """English prose of about 100,000 tokens: *Northanger Abbey* for calibration, *Persuasion* for evaluation."""
    return data_file(f"prose_{split}.txt").read_text(encoding="utf-8")


def prose_ids(tokenizer: PreTrainedTokenizerBase, split: Split, n_tokens: int | None = None) -> torch.Tensor:
    """The first `n_tokens` token ids of a prose split, without special tokens; int64, shape ``[n_tokens]``.

    Raises
    ------
    DataError : the text is shorter than asked for.
    """
    import torch

    text = prose(split)
    if n_tokens is not None:
        text = text[: n_tokens * 12]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if n_tokens is not None and len(ids) < n_tokens:
        raise DataError(f"The {split} prose has {len(ids)} tokens, {n_tokens} were asked for.", "Ask for fewer tokens.")
    return torch.tensor(ids[:n_tokens], dtype=torch.long)


@cache
def chat_prompts() -> tuple[ChatPrompt, ...]:
    """32 single-turn user prompts in eight kinds, in a fixed order."""
    lines = data_file("chat_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(ChatPrompt.model_validate(json.loads(line)) for line in lines)


def chat_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of one user turn in the tokenizer's own chat template, ready for the model to answer."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(rendered["input_ids"])


class Needle(BaseModel):
    """A fact hidden in prose, the question for it, and the answer that a correct reply contains."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context: str
    question: str
    answer: str
    depth: float


def needle(n_characters: int, depth: float, seed: int = 0) -> Needle:
    """Hide a four-digit number in `n_characters` of evaluation prose, at `depth` (0 is the start, 1 the end)."""
    rng = random.Random(seed)
    text = prose("evaluation")
    start = rng.randrange(0, len(text) - n_characters)
    hay = text[start : start + n_characters]
    answer = str(rng.randrange(1000, 9999))
    cut = hay.find(" ", int(depth * (n_characters - 1)))
    cut = len(hay) if cut < 0 else cut
    context = f"{hay[:cut]} The number on the garden gate is {answer}. {hay[cut + 1 :]}"
    return Needle(context=context, question="What is the number on the garden gate?", answer=answer, depth=depth)
