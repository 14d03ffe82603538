"""Text for distilling a draft: the target's own answers, each token with the target's distribution over its likeliest tokens.

Prompts come from templates (``data/draft_prompts.json``) and from the calibration prose; the 32 chat prompts and the
evaluation prose are never used. Half of the answers are greedy, half are sampled: a draft must know both kinds of context.
"""

from __future__ import annotations

import itertools
import json
import random
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from helpers.corpora import chat_ids, chat_prompts, data_file, prose_ids
from helpers.errors import DataError
from helpers.kv_adapter import new_cache

PROMPTS = "draft_prompts.json"
TOP_K = 32
"""Tokens whose probabilities are kept at each position; on this model's answers they hold nearly all of the mass."""


@dataclass(frozen=True)
class Row:
    """One text: its tokens, and the target's distribution at each token of the answer.

    ``ids`` int64 ``[n]``; ``start`` the first answer token's index; ``top_ids`` int64 and ``top_logp`` float32
    ``[n - start, TOP_K]``: row i is the target's distribution (natural logarithms) for token ``start + i``.
    """

    ids: torch.Tensor
    start: int
    top_ids: torch.Tensor
    top_logp: torch.Tensor


def expand(groups: list[dict[str, Any]]) -> list[str]:
    """Every prompt that the groups of one kind can make: each template with each combination of its own slots."""
    texts = []
    for group in groups:
        for template in group["templates"]:
            names = sorted({name for _, name, _, _ in string.Formatter().parse(template) if name})
            choices = [group["slots"][name] for name in names]
            for values in itertools.product(*choices):
                texts.append(template.format(**dict(zip(names, values, strict=True))))
    return list(dict.fromkeys(texts))


def training_prompts(n: int, seed: int) -> list[str]:
    """`n` different prompts, as equally many of each kind as there are, in random order; none of the 32 chat prompts.

    Raises
    ------
    DataError : the templates cannot make so many.
    """
    kinds = json.loads(data_file(PROMPTS).read_text(encoding="utf-8"))["kinds"]
    rng = random.Random(seed)
    held_out = {prompt.text for prompt in chat_prompts()}
    pools = []
    for groups in kinds.values():
        pool = [text for text in expand(groups) if text not in held_out]
        rng.shuffle(pool)
        pools.append(pool)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*pools))
    chosen = list(itertools.islice((text for text in turns if text is not None), n))
    if len(chosen) < n:
        raise DataError(f"data/{PROMPTS} makes {len(chosen)} prompts, {n} were asked for.", "Ask for fewer.")
    rng.shuffle(chosen)
    return chosen


def prose_windows(tokenizer: Any, split: Any, n: int, length: int) -> list[list[int]]:
    """`n` passages of `length` tokens, evenly spread over a prose split."""
    text = prose_ids(tokenizer, split).tolist()
    stride = (len(text) - length) // n
    return [text[i * stride : i * stride + length] for i in range(n)]


def prompt_rows(tokenizer: Any, n_chat: int, n_prose: int, prose_tokens: int, seed: int) -> list[list[int]]:
    """Token ids of all training prompts: chat prompts in the chat template, then passages of the calibration prose."""
    chat = [chat_ids(tokenizer, text) for text in training_prompts(n_chat, seed)]
    return chat + prose_windows(tokenizer, "calibration", n_prose, prose_tokens)


@torch.inference_mode()
def answer(
    model: Any,
    prompts: list[list[int]],
    n_tokens: int,
    eos: int,
    temperatures: torch.Tensor,
    generator: torch.Generator,
) -> list[Row]:
    """Answers of at most `n_tokens` tokens to prompts of any lengths, in one batch; row i is greedy where its temperature is 0.

    Prompts are padded on the left and masked, so a row's answer is what it would be alone (up to rounding).
    """
    n, width = len(prompts), max(map(len, prompts))
    ids = torch.zeros(n, width, dtype=torch.long)
    mask = torch.zeros(n, width + n_tokens, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, fed = new_cache("dynamic", model.config), ids
    tokens, tops, logps = [], [], []
    ended = torch.zeros(n, dtype=torch.bool)
    lengths = torch.zeros(n, dtype=torch.long)
    greedy = temperatures == 0
    for step in range(n_tokens):
        end = width + step
        span = slice(0, end) if step == 0 else slice(end - 1, end)
        logits = model(
            fed, attention_mask=mask[:, :end], position_ids=positions[:, span], past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        logp = logits.float().log_softmax(-1)
        top = logp.topk(TOP_K)
        probs = (top.values / temperatures.clamp(min=1e-3)[:, None]).softmax(-1)
        drawn = top.indices.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]
        chosen = torch.where(greedy, top.indices[:, 0], drawn)
        tokens.append(chosen)
        tops.append(top.indices)
        logps.append(top.values)
        lengths += ~ended
        ended |= chosen == eos
        if ended.all():
            break
        fed = chosen[:, None]
    answers, top_ids, top_logp = torch.stack(tokens, 1), torch.stack(tops, 1), torch.stack(logps, 1)
    return [
        Row(
            ids=torch.cat([torch.tensor(prompt), answers[i, : lengths[i]]]),
            start=len(prompt),
            top_ids=top_ids[i, : lengths[i]].clone(),
            top_logp=top_logp[i, : lengths[i]].clone(),
        )
        for i, prompt in enumerate(prompts)
    ]


def save_rows(rows: list[Row], path: Path) -> None:
    """Write rows to one safetensors file, which appears whole or not at all."""
    from safetensors.torch import save_file

    part = path.with_suffix(".part")
    save_file(
        {
            "ids": torch.cat([row.ids for row in rows]).int(),
            "lengths": torch.tensor([len(row.ids) for row in rows]),
            "starts": torch.tensor([row.start for row in rows]),
            "top_ids": torch.cat([row.top_ids for row in rows]).int(),
            "top_logp": torch.cat([row.top_logp for row in rows]).half(),
        },
        part,
    )
    part.replace(path)


def load_rows(path: Path) -> list[Row]:
    """The rows of `save_rows`."""
    from safetensors.torch import load_file

    held = load_file(path)
    lengths, starts = held["lengths"].tolist(), held["starts"].tolist()
    ids = held["ids"].long().split(lengths)
    answers = [n - start for n, start in zip(lengths, starts, strict=True)]
    tops, logps = held["top_ids"].long().split(answers), held["top_logp"].float().split(answers)
    return [Row(*parts) for parts in zip(ids, starts, tops, logps, strict=True)]


def generate(
    model: Any,
    prompts: list[list[int]],
    folder: Path,
    *,
    n_tokens: int,
    batch: int,
    temperature: float,
    eos: int,
    seed: int,
) -> list[Row]:
    """Answer all prompts, a file for each batch; files that are there already are read, so that a stopped run goes on.

    Prompts of like length share a batch. Every other answer is greedy, the others are drawn at `temperature` (from the
    `TOP_K` likeliest tokens).
    """
    folder.mkdir(parents=True, exist_ok=True)
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    rows: list[Row] = []
    for number, first in enumerate(tqdm(range(0, len(order), batch), desc="answers", unit="batch")):
        path = folder / f"answers_{number:04}.safetensors"
        chosen = order[first : first + batch]
        if not path.exists():
            generator = torch.Generator().manual_seed(seed * 100_003 + number)
            temperatures = torch.tensor([0.0 if i % 2 == 0 else temperature for i in chosen])
            save_rows(answer(model, [prompts[i] for i in chosen], n_tokens, eos, temperatures, generator), path)
        rows += load_rows(path)
    return rows
