"""Checks of notebook 04's exercises: merging states, masked rows, words moved, the backward pass, and splits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.exercises import Answer, Mismatch, exercise, expect, expect_equal


def _tensor(value: Any) -> torch.Tensor:
    """A tensor, an array or nested lists as a detached float64 tensor; raises what Torch raises for anything else."""
    return torch.as_tensor(value, dtype=torch.float64).detach()


def _tensors(prop: str, given: str, value: Any, names: tuple[str, ...]) -> list[torch.Tensor]:
    """The parts of a tuple result as tensors."""
    wanted = f"a tuple of {len(names)}: ({', '.join(names)})"
    got = f"a {type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
    expect(prop, given, isinstance(value, tuple | list) and len(value) == len(names), wanted, got)
    try:
        return [_tensor(part) for part in value]
    except (TypeError, ValueError, RuntimeError):
        raise Mismatch(prop, given, wanted, ", ".join(type(part).__name__ for part in value)) from None


def _rounded(row: torch.Tensor) -> list[float]:
    """A row's elements with four decimals, for messages."""
    return [round(x, 4) for x in row.tolist()]


def _close(prop: str, given: str, got: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Demand equal shapes, equal infinities and no NaN, and a bounded difference of the rest."""
    expect(f"{prop} (shape)", given, got.shape == expected.shape, tuple(expected.shape), tuple(got.shape))
    expect(f"{prop} (no NaN)", given, not bool(got.isnan().any()), "no NaN", f"{int(got.isnan().sum())} NaN")
    expected = expected.double()
    finite = expected.isfinite()
    same = bool(torch.equal(got[~finite], expected[~finite]))
    expect(f"{prop} (infinities)", given, same, "minus infinity where nothing was seen", _rounded(got[~finite]))
    worst = float((got[finite] - expected[finite]).abs().max()) if bool(finite.any()) else 0.0
    expect(prop, given, worst <= bound, f"a difference of at most {bound:g}", f"{worst:.2e}")


def _state(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference output and natural log-sum-exp of rows of scores (minus infinity where unseen), float64."""
    scores = scores.double()
    lse = scores.logsumexp(dim=1)
    return (scores - lse[:, None]).exp().nan_to_num() @ v.double(), lse


@exercise("04.1", "Merge a natural and a base-2 state")
def _merge(answer: Callable[..., Any]) -> None:
    call, prop = Answer(answer), "the merge equals attention over all tokens"
    generator = torch.Generator().manual_seed(41)
    for what, scale, n_a, n_b in (
        ("ordinary scores", 1.0, 5, 3),
        ("one part much heavier", 1.0, 200, 1),
        ("scores around 500", 100.0, 4, 4),
        ("rows unseen in the first part", 1.0, 4, 5),
        ("rows unseen in the second part", 1.0, 5, 4),
        ("rows unseen in both", 1.0, 4, 4),
    ):
        scores = scale * (torch.randn(3, n_a + n_b, generator=generator) + (5.0 if scale > 1 else 0.0))
        v = torch.randn(n_a + n_b, 8, generator=generator)
        if "first" in what or "both" in what:
            scores[1, :n_a] = -math.inf
        if "second" in what or "both" in what:
            scores[1, n_a:] = -math.inf
        (out_a, lse_a), (out_b, lse_b) = _state(scores[:, :n_a], v[:n_a]), _state(scores[:, n_a:], v[n_a:])
        arguments = (out_a, lse_a, out_b, lse_b / math.log(2))
        shown = f"lse_a={_rounded(lse_a)}, lse_b_base2={_rounded(arguments[3])}"
        given = f"{what}: {n_a} and {n_b} tokens, 3 rows, {shown}"
        result = call(prop, given, "no error", *(x.float() for x in arguments))
        out, lse = _tensors("output and log-sum-exp are returned", given, result, ("output", "lse"))
        expected_out, expected_lse = _state(scores, v)
        _close(
            "the log-sum-exp is the natural one of all tokens", given, lse, expected_lse, 1e-3 if scale > 1 else 1e-5
        )
        _close(prop, given, out, expected_out, 1e-3 if scale > 1 else 1e-5)


def _masks(n_q: int, n_k: int) -> list[tuple[str, torch.Tensor]]:
    rows, columns = torch.arange(n_q)[:, None] + n_k - n_q, torch.arange(n_k)[None]
    causal = columns <= rows
    padded = causal & (columns >= n_k // 2)
    return [
        ("a causal mask", causal),
        ("a sliding window", causal & (columns > rows - 5)),
        ("a prompt padded on the left, whose own rows see nothing", padded),
        ("a mask that hides everything from every second row", causal & (rows % 2 == 0)),
        ("no mask", torch.ones(n_q, n_k, dtype=torch.bool)),
    ]


@exercise("04.2", "Find the bug: rows that have seen nothing yet")
def _masked(answer: Callable[..., Any]) -> None:
    call = Answer(answer)
    generator = torch.Generator().manual_seed(42)
    for n_q, n_k, block_k in ((40, 40, 16), (7, 50, 16), (33, 33, 8), (5, 20, 64)):
        q, k, v = (torch.randn(n, 8, generator=generator) for n in (n_q, n_k, n_k))
        for what, mask in _masks(n_q, n_k):
            prop = f"the output equals dense attention, zeros where nothing is seen: {what}"
            given = f"{what}, {n_q} queries, {n_k} keys, block_k={block_k}"
            scores = (q.double() @ k.double().T / 8**0.5).masked_fill(~mask, -math.inf)
            result = call(prop, given, "no error", q.clone(), k.clone(), v.clone(), mask.clone(), block_k)
            try:
                got = _tensor(result)
            except (TypeError, ValueError, RuntimeError):
                raise Mismatch("the output is a tensor", given, "a tensor", type(result).__name__) from None
            _close(prop, given, got, _state(scores, v)[0], 1e-5)


def _causal_words(n: int, d: int, block_q: int, block_k: int) -> int:
    """Reference by visiting every tile."""
    words = 2 * n * d + n
    for top, left in itertools.product(range(0, n, block_q), range(0, n, block_k)):
        if left <= min(top + block_q, n) - 1:
            words += 2 * d * (min(left + block_k, n) - left)
    return words


@exercise("04.3", "Words moved under a causal mask")
def _words(answer: Callable[..., Any]) -> None:
    call = Answer(answer)
    cases = [
        ("one tile is read whole", 8, 4, 8, 8),
        ("tiles above the diagonal are skipped", 8, 4, 2, 2),
        ("tiles above the diagonal are skipped", 64, 16, 16, 16),
        ("blocks of queries and keys may differ", 64, 16, 8, 32),
        ("blocks of queries and keys may differ", 64, 16, 32, 8),
        ("a ragged last block reads only the rows that exist", 70, 16, 16, 16),
        ("a ragged last block reads only the rows that exist", 1, 3, 16, 16),
        ("blocks larger than the text change nothing", 10, 4, 100, 100),
        ("unequal ragged blocks", 101, 8, 12, 20),
    ]
    for prop, n, d, block_q, block_k in cases:
        given, expected = f"n={n}, d={d}, block_q={block_q}, block_k={block_k}", _causal_words(n, d, block_q, block_k)
        expect_equal(prop, given, call(prop, given, expected, n, d, block_q, block_k), expected)


class _Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, torch.Tensor):
                self.elements = max(self.elements, part.numel())
        return result


@exercise("04.4", "The backward pass, tile by tile")
def _backward(answer: Callable[..., Any]) -> None:
    call = Answer(answer)
    generator = torch.Generator().manual_seed(44)
    for n, d, causal, block in (
        (8, 4, False, 32),
        (48, 8, False, 16),
        (48, 8, True, 16),
        (70, 8, True, 32),
        (64, 4, True, 8),
    ):
        q, k, v, d_out = (torch.randn(n, d, generator=generator, dtype=torch.float64) for _ in range(4))
        given = f"n={n}, d={d}, causal={causal}, block={block}"
        with torch.enable_grad():
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            scores = leaves[0] @ leaves[1].T / d**0.5
            if causal:
                scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
            out, lse = scores.softmax(dim=1) @ leaves[2], scores.logsumexp(dim=1)
            expected = torch.autograd.grad(out, leaves, d_out)
        arguments = [x.detach().clone() for x in (q, k, v, out, lse, d_out)]
        with torch.no_grad(), _Largest() as largest:
            result = call("the gradients equal autograd's", given, "no error", *arguments, causal, block)
        kind = "under a causal mask" if causal else "without a mask"
        got = _tensors("dq, dk and dv are returned", given, result, ("dq", "dk", "dv"))
        for name, ours, theirs in zip(("dv", "dk", "dq"), got[::-1], expected[::-1], strict=True):
            _close(f"{name} equals autograd's, {kind}", given, ours, theirs, 1e-5)
        if n > 3 * d and n > block:
            prop = "no PyTorch tensor holds n * n elements"
            expect(prop, given, largest.elements < n * n, f"fewer than {n * n} elements", largest.elements)


def _best_splits(n_tokens: int, block_n: int, n_units: int, n_processors: int, merge_cost: float) -> int:
    n_blocks = math.ceil(n_tokens / block_n)
    times = {
        s: math.ceil(n_units * s / n_processors) * math.ceil(n_blocks / s) + (merge_cost * s if s > 1 else 0)
        for s in range(1, n_blocks + 1)
    }
    return min(times, key=lambda s: (times[s], s))


@exercise("04.5", "How many splits?")
def _splits(answer: Callable[..., Any]) -> None:
    call = Answer(answer)
    cases: list[tuple[str, int, int, int, int, float]] = [
        ("idle processors are filled", 4096, 64, 8, 64, 0.25),
        ("where all processors are busy, nothing is split", 4096, 64, 64, 64, 1.0),
        ("an expensive merge is avoided", 4096, 64, 8, 64, 100.0),
        ("there are at most as many splits as blocks", 100, 64, 1, 1000, 0.0),
        ("a ragged last block is a block", 65, 64, 1, 8, 0.0),
        ("of equal times the smallest number", 640, 64, 1, 8, 0.0),
        ("half a wave costs a whole one", 4096, 64, 48, 64, 0.5),
        ("one token, one split", 1, 64, 1, 108, 0.0),
        ("one split needs no merge", 128, 64, 1, 2, 0.6),
    ]
    names = ("n_tokens", "block_n", "n_units", "n_processors", "merge_cost")
    for prop, *numbers in cases:
        given = ", ".join(f"{name}={value}" for name, value in zip(names, numbers, strict=True))
        expected = _best_splits(*numbers)  # type: ignore[arg-type]
        expect_equal(prop, given, call(prop, given, expected, *numbers), expected)
    prop = "the modelled time is the least of all"
    for arguments in itertools.product((63, 500, 1111), (16, 64), (1, 9, 32), (4, 108), (0.0, 0.3, 2.0)):
        given = ", ".join(f"{name}={value}" for name, value in zip(names, arguments, strict=True))
        expected = _best_splits(*arguments)
        expect_equal(prop, given, call(prop, given, expected, *arguments), expected)
