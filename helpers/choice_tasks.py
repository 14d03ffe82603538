"""Short tasks with four choices: facts, sums, lines of code, and a number hidden in a long text. Written for this course.

They are small on purpose: a few seconds on two cores, and intervals so wide that nobody mistakes them for a leaderboard. The
model answers by the largest logit of the four continuations' first differing token; nothing is generated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from helpers import corpora
from helpers.errors import DataError
from helpers.ledgers import QualityResult
from helpers.quality import accuracy

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

KINDS = ("facts", "maths", "code", "long context")
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Russia": "Moscow",
    "Portugal": "Lisbon",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Cuba": "Havana",
    "Kenya": "Nairobi",
    "Iran": "Tehran",
    "Ireland": "Dublin",
    "Poland": "Warsaw",
    "Norway": "Oslo",
}
CODE = (
    ("def add(a, b):\n    return a", " +", (" -", " *", " /")),
    ("def is_even(n):\n    return n % 2 ==", " 0", (" 1", " 2", " 3")),
    ("def largest(values):\n    return", " max", (" min", " sum", " len")),
    ("def mean(values):\n    return sum(values) /", " len", (" max", " sum", " min")),
    ("for i in range(10):\n    print(", "i", ("10", "x", "range")),
    ("total = 0\nfor x in numbers:\n    total +=", " x", (" 1", " total", " numbers")),
    ("if x > 0:\n    print('positive')\nelif x < 0:\n    print('", "negative", ("positive", "zero", "x")),
    ("with open('data.txt') as f:\n    text = f.", "read", ("write", "close", "open")),
    ("try:\n    value = int(text)\nexcept", " ValueError", (" KeyError", " IndexError", " OSError")),
    ("words = sentence.", "split", ("join", "append", "sort")),
    ("def factorial(n):\n    return 1 if n == 0 else n *", " factorial", (" n", " 1", " range")),
    ("import math\narea =", " math", (" area", " import", " len")),
)


class ChoiceTask(BaseModel):
    """One question: what precedes the choices, and the first token in which they differ (the right one first)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    prompt_ids: tuple[int, ...]
    choice_ids: tuple[int, ...]


def _task(tokenizer: PreTrainedTokenizerBase, kind: str, prompt: str, right: str, wrong: Sequence[str]) -> ChoiceTask:
    rows = [tokenizer(prompt + choice, add_special_tokens=False)["input_ids"] for choice in (right, *wrong)]
    common = 0
    while all(len(row) > common and row[common] == rows[0][common] for row in rows):
        common += 1
    firsts = tuple(row[common] if len(row) > common else -1 for row in rows)
    if len(set(firsts)) < len(firsts) or -1 in firsts or common == 0:
        raise DataError(
            f"The choices of {prompt[-40:]!r} do not differ in one token of this tokenizer.",
            "Take other choices, or another model.",
        )
    return ChoiceTask(kind=kind, prompt_ids=tuple(rows[0][:common]), choice_ids=firsts)


def choice_tasks(
    tokenizer: PreTrainedTokenizerBase, *, n_long: int = 6, n_characters: int = 900, seed: int = 0
) -> list[ChoiceTask]:
    """16 facts, 16 sums, 12 lines of code and `n_long` numbers hidden in `n_characters` of prose. The same for equal seeds.

    A question whose choices this tokenizer cannot tell apart in one token is left out.
    """
    rng = random.Random(seed)
    raw: list[tuple[str, str, str, list[str]]] = []
    for country, city in CAPITALS.items():
        others = rng.sample([c for c in CAPITALS.values() if c != city], 3)
        raw.append(("facts", f"The capital of {country} is", f" {city}", [f" {c}" for c in others]))
    sums = [(a, b) for a in range(2, 8) for b in range(2, 10 - a) if (a, b) != (4, 4)]
    for a, b in rng.sample(sums, 16):
        wrong = rng.sample([n for n in range(1, 10) if n != a + b], 3)
        raw.append(("maths", f"1 + 2 = 3. 4 + 4 = 8. {a} + {b} =", f" {a + b}", [f" {n}" for n in wrong]))
    raw += [("code", prompt, right, list(wrong)) for prompt, right, wrong in CODE]
    for i in range(n_long):
        hidden = corpora.needle(n_characters, (i + 0.5) / n_long, seed=seed + i)
        digits = rng.sample([d for d in "123456789" if d != hidden.answer[0]], 3)
        prompt = f"{hidden.context}\n\nQuestion: {hidden.question}\nAnswer: The number on the garden gate is"
        raw.append(("long context", prompt, f" {hidden.answer}", [f" {d}{hidden.answer[1:]}" for d in digits]))
    tasks = []
    for kind, prompt, right, wrongs in raw:
        try:
            tasks.append(_task(tokenizer, kind, prompt, right, wrongs))
        except DataError:
            continue
    if {task.kind for task in tasks} != set(KINDS):
        raise DataError("This tokenizer cannot tell the choices of a whole kind of task apart.", "Take another model.")
    return tasks


def task_accuracies(
    last_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tasks: Sequence[ChoiceTask], protocol: str
) -> dict[str, QualityResult]:
    """Accuracy by kind of task, with Wilson intervals; chance is a quarter.

    Parameters
    ----------
    last_logits : maps int64 ids of shape ``[n, t]``, padded on the right with 0, and lengths of shape ``[n]`` to the logits after
        each row's last token, shape ``[n, vocab_size]``.
    protocol : the model and its dtype.
    """
    import torch

    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        group = sorted((task for task in tasks if task.kind == kind), key=lambda task: len(task.prompt_ids))
        for start in range(0, len(group), 8):
            batch = group[start : start + 8]
            lengths = torch.tensor([len(task.prompt_ids) for task in batch])
            ids = torch.zeros(len(batch), int(lengths.max()), dtype=torch.long)
            for row, task in enumerate(batch):
                ids[row, : len(task.prompt_ids)] = torch.tensor(task.prompt_ids)
            with torch.inference_mode():
                logits = last_logits(ids, lengths)
            for row, task in enumerate(batch):
                right[kind].append(int(logits[row, list(task.choice_ids)].argmax()) == 0)
    return {
        kind: accuracy(sum(r), len(r), task=kind, protocol=f"four choices, by the first differing token, {protocol}")
        for kind, r in right.items()
    }
