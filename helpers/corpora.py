"""Texts that the course measures on. All lie in ``data/`` with licence and source in ``data/README.md``, checked by hash."""

from __future__ import annotations

import csv
import json
import random
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pooch
from pydantic import BaseModel, ConfigDict

from helpers.errors import DataError, UnknownNameError, suggest
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


class ServingLengths(BaseModel):
    """Prompt and output lengths of a real serving trace as a fit: quantiles of prompts, and of outputs given the prompt.

    The output's quantiles are given for equally many requests each, from those with the shortest prompts to those with the
    longest. Between two quantiles the logarithm of the length is interpolated.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str
    licence: str
    n_requests: int
    """Requests in the trace that was fitted."""
    mean_prompt_tokens: float
    mean_output_tokens: float
    requests_per_second: float
    """Mean rate over the trace."""
    arrival_gap_cv: float
    """Coefficient of variation of the gaps between arrivals; 1 is Poisson."""
    ks_distance: dict[str, float]
    """Kolmogorov-Smirnov distance of 20,000 draws from the trace itself, for several quantities. Zero is a perfect fit."""
    prompt_levels: tuple[float, ...]
    prompt_quantiles: tuple[int, ...]
    output_levels: tuple[float, ...]
    output_quantiles: tuple[tuple[int, ...], ...]

    def sample(self, n: int, seed: int = 0) -> list[tuple[int, int]]:
        """Draw `n` requests: (prompt tokens, output tokens)."""
        rng = np.random.default_rng(seed)
        u, w = rng.random(n), rng.random(n)
        prompts = np.exp(np.interp(u, self.prompt_levels, np.log(self.prompt_quantiles)))
        group = np.minimum((u * len(self.output_quantiles)).astype(int), len(self.output_quantiles) - 1)
        logs = np.log(np.asarray(self.output_quantiles, dtype=float))
        outputs = [float(np.exp(np.interp(w[i], self.output_levels, logs[group[i]]))) for i in range(n)]
        return [(max(1, round(float(p))), max(1, round(o))) for p, o in zip(prompts, outputs, strict=True)]


@cache
def _serving_lengths() -> dict[str, ServingLengths]:
    rows = json.loads(data_file("serving_lengths.json").read_text(encoding="utf-8"))
    return {row["name"]: ServingLengths.model_validate(row) for row in rows}


def serving_lengths(name: str) -> ServingLengths:
    """The fit of one serving trace: ``azure-conversation-2023`` or ``azure-code-2023``."""
    known = _serving_lengths()
    if name not in known:
        raise UnknownNameError(f"There is no serving trace {name!r}.", suggest(name, list(known)))
    return known[name]


def read_azure_trace(path: str | Path) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of every request in a CSV file of the Azure Public Dataset's LLM inference traces.

    Raises
    ------
    DataError : the file cannot be read, or has no columns ContextTokens and GeneratedTokens.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is not an Azure LLM inference trace: {type(error).__name__}: {error}",
            "Give a CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure Public Dataset, CC-BY 4.0).",
        ) from error
    if not rows:
        raise DataError(f"{path} has no requests.", "Give the published file whole.")
    return rows
