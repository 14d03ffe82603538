"""Quality, each number with its protocol, so that two numbers are only ever compared under one protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from helpers.errors import MeasurementRefused
from helpers.ledgers import QualityResult
from helpers.stats import wilson_interval

if TYPE_CHECKING:
    import torch

Logits = Any
"""A float tensor of shape ``[n_tokens, vocab_size]``."""


def perplexity(
    logits_of: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, *, window: int, corpus: str
) -> QualityResult:
    """Token-level perplexity over non-overlapping windows.

    Parameters
    ----------
    logits_of : maps int64 ids of shape ``[1, t]`` to logits of shape ``[1, t, vocab_size]``.
    ids : the text, int64, shape ``[n]``; the last partial window is left out.
    window : tokens in a window. No beginning-of-sequence token is added and no context crosses windows; the first token of
        each window is not scored.

    Raises
    ------
    MeasurementRefused : the text is shorter than one window.
    """
    import torch

    n_windows = len(ids) // window
    if n_windows == 0 or window < 2:
        raise MeasurementRefused(
            f"Perplexity over windows of {window} tokens needs at least that many; the text has {len(ids)}.",
            "Give a longer text or a shorter window.",
        )
    total, count = 0.0, 0
    with torch.inference_mode():
        for index in range(n_windows):
            chunk = ids[index * window : (index + 1) * window][None]
            logits = logits_of(chunk)[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, chunk[0, 1:], reduction="sum"))
            count += window - 1
    return QualityResult(
        metric="perplexity",
        value=math.exp(total / count),
        protocol=f"{corpus}, token level, window {window}, stride {window}, no BOS, {n_windows} windows",
        n=count,
    )


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL(reference || other) in nats over positions; both are logits of shape ``[n, vocab_size]``."""
    import torch

    p = torch.log_softmax(reference.double(), dim=-1)
    q = torch.log_softmax(other.double(), dim=-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


class GreedyMatch(BaseModel):
    """How far two greedy outputs agree, and how close a tie the reference was at the first difference."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n: int
    agree: int
    """Length of the common prefix."""
    margin: float | None = None
    """Reference top-1 minus top-2 logit at the first difference; None where there is none or no logits were given."""

    @property
    def identical(self) -> bool:
        return self.agree == self.n

    @property
    def verdict(self) -> str:
        """``identical``; ``tie`` where the margin is below 1e-3; else ``differs``."""
        if self.identical:
            return "identical"
        return "tie" if self.margin is not None and self.margin < 1e-3 else "differs"


def greedy_match(
    reference: Sequence[int], other: Sequence[int], reference_logits: torch.Tensor | None = None
) -> GreedyMatch:
    """Compare two greedy outputs of one prompt token by token.

    `reference_logits`, shape ``[n, vocab_size]``, are the logits from which the reference's tokens were taken.
    """
    n = max(len(reference), len(other))
    agree = 0
    while agree < min(len(reference), len(other)) and reference[agree] == other[agree]:
        agree += 1
    margin = None
    if agree < n and reference_logits is not None and agree < len(reference_logits):
        top = reference_logits[agree].float().topk(2).values
        margin = float(top[0] - top[1])
    return GreedyMatch(n=n, agree=agree, margin=margin)


def greedy_agreement(
    reference: Sequence[Sequence[int]], other: Sequence[Sequence[int]], protocol: str
) -> QualityResult:
    """Share of requests whose greedy outputs are identical, with a Wilson interval."""
    if len(reference) != len(other) or not reference:
        raise MeasurementRefused(
            f"Greedy agreement needs outputs in pairs; there are {len(reference)} and {len(other)}.",
            "Run both engines on the same workload.",
        )
    same = sum(list(a) == list(b) for a, b in zip(reference, other, strict=True))
    low, high = wilson_interval(same, len(reference))
    return QualityResult(
        metric="identical greedy outputs",
        value=same / len(reference),
        protocol=protocol,
        n=len(reference),
        low=low,
        high=high,
    )


def accuracy(correct: int, n: int, *, task: str, protocol: str) -> QualityResult:
    """Task accuracy with a Wilson interval."""
    low, high = wilson_interval(correct, n)
    return QualityResult(metric=f"{task} accuracy", value=correct / n, protocol=protocol, n=n, low=low, high=high)


def top1_agreement(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    protocol: str,
) -> QualityResult:
    """Share of generated tokens that the reference would also have put first, given the same tokens before them.

    One pass over prompt and output scores every token of a request, so that one early difference does not make all later
    tokens count as wrong. The interval is Wilson's over tokens; tokens of one request are not independent.

    Parameters
    ----------
    logits_of : the reference; maps int64 ids of shape ``[1, t]`` to logits of shape ``[1, t, vocab_size]``.
    prompts, outputs : token ids of each request, in one order.
    protocol : the reference, its dtype, and which requests these are.

    Raises
    ------
    MeasurementRefused : there are not as many outputs as prompts, or no token was generated.
    """
    import torch

    if len(prompts) != len(outputs) or not any(len(output) for output in outputs):
        raise MeasurementRefused(
            f"Top-1 agreement needs an output for each prompt; there are {len(prompts)} prompts and "
            f"{sum(len(output) > 0 for output in outputs)} outputs.",
            "Score only the requests that completed.",
        )
    same, n = 0, 0
    with torch.inference_mode():
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = torch.tensor([*prompt, *output])[None]
            best = logits_of(ids)[0, len(prompt) - 1 : -1].argmax(-1).tolist()
            same += sum(int(a == b) for a, b in zip(best, output, strict=True))
            n += len(output)
    low, high = wilson_interval(same, n)
    return QualityResult(
        metric="top-1 agreement", value=same / n, protocol=f"teacher-forced, {protocol}", n=n, low=low, high=high
    )
