"""Checks of notebook 01's exercises: the KV cache's size, a cached step, its positions, and what fits into a budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from helpers.exercises import Mismatch, attempted, exercise, expect, expect_equal

Step = Callable[..., Any]


@exercise("01.1", "KV bytes from a configuration")
def _kv_bytes(answer: Callable[..., Any]) -> None:
    base = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 64}
    cases: list[tuple[str, dict[str, Any], int, float, float]] = [
        ("MHA keeps a key and a value for every head", base, 10, 4, 2 * 2 * 64 * 10 * 4),
        ("only KV heads are stored (GQA)", {**base, "num_key_value_heads": 2}, 10, 2, 2 * 2 * 16 * 10 * 2),
        ("only KV heads are stored (MQA)", {**base, "num_key_value_heads": 1}, 7, 2, 2 * 2 * 8 * 7 * 2),
        ("an explicit head_dim wins", {**base, "num_key_value_heads": 2, "head_dim": 24}, 5, 2, 2 * 2 * 48 * 5 * 2),
        ("None means missing", {**base, "num_key_value_heads": None, "head_dim": None}, 3, 1, 2 * 2 * 64 * 3),
        ("a sliding window bounds the tokens kept", {**base, "sliding_window": 16}, 100, 2, 2 * 2 * 64 * 16 * 2),
        ("a window longer than the text changes nothing", {**base, "sliding_window": 16}, 9, 2, 2 * 2 * 64 * 9 * 2),
        ("no tokens, no bytes", base, 0, 2, 0),
        ("half a byte an element is allowed", base, 4, 0.5, 2 * 2 * 64 * 4 * 0.5),
    ]
    for prop, config, n_tokens, width, expected in cases:
        expect_equal(prop, {**config, "n_tokens": n_tokens, "bytes": width}, answer(config, n_tokens, width), expected)


def _tensors(step: Step, prop: str, given: str, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Call a student's step and demand three tensors, the inputs left as they were."""
    before = [tensor.clone() for tensor in arguments]
    result = attempted(step(*arguments))
    good = isinstance(result, tuple | list) and len(result) == 3 and all(isinstance(t, torch.Tensor) for t in result)
    expect("three tensors are returned: output, keys, values", given, good, "(output, new_k, new_v)", type(result))
    same = all(torch.equal(a, b) for a, b in zip(before, arguments, strict=True))
    expect("the inputs are not changed", given, same, "unchanged inputs", "changed inputs")
    return tuple(result)


def _close(prop: str, given: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    expect(f"{prop} (shape)", given, got.shape == expected.shape, tuple(expected.shape), tuple(got.shape))
    worst = float((got - expected).abs().max()) if expected.numel() else 0.0
    expect(prop, given, worst <= 1e-5, "a difference of at most 1e-5", f"{worst:.2e}")


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Reference: causal attention of one head over ``[n, head_dim]``."""
    return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


@exercise("01.2", "One cached step of one head")
def _cached_step(answer: Step) -> None:
    generator = torch.Generator().manual_seed(12)
    for n_tokens, head_dim in ((1, 4), (5, 8), (9, 16)):
        q, k, v = (torch.randn(n_tokens, head_dim, generator=generator) for _ in range(3))
        full = _attention(q, k, v)
        held_k, held_v = k[:0], v[:0]
        for t in range(n_tokens):
            given = f"token {t} of {n_tokens}, head_dim {head_dim}"
            output, held_k, held_v = _tensors(answer, "step", given, q[t], k[t], v[t], held_k, held_v)
            _close("the cache holds all keys up to and with the newest", given, held_k, k[: t + 1])
            _close("the cache holds all values up to and with the newest", given, held_v, v[: t + 1])
            _close("the output equals full causal attention", given, output, full[t])


def _rotate(x: torch.Tensor, first: int, theta: float) -> torch.Tensor:
    """Reference RoPE of rows at positions `first`, `first` + 1, ..., as complex numbers (element i with i + d/2)."""
    n, d = x.shape
    frequencies = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.arange(first, first + n, dtype=torch.float64)[:, None] * frequencies
    turned = torch.complex(x[:, : d // 2].double(), x[:, d // 2 :].double()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


@exercise("01.3", "Find the bug: positions of a cached step")
def _rope_step(answer: Step) -> None:
    generator = torch.Generator().manual_seed(13)
    for n_prefill, n_steps, head_dim, theta in ((0, 3, 8, 1e4), (1, 2, 8, 1e4), (6, 3, 16, 1e5), (40, 2, 4, 500.0)):
        n = n_prefill + n_steps
        q, k, v = (torch.randn(n, head_dim, generator=generator) for _ in range(3))
        rotated = _rotate(k, 0, theta)
        full = _attention(_rotate(q, 0, theta), rotated, v)
        held_k, held_v = rotated[:n_prefill], v[:n_prefill]
        for t in range(n_prefill, n):
            given = f"position {t} after a prefill of {n_prefill}, head_dim {head_dim}, theta {theta:g}"

            def step(*tensors: torch.Tensor, base: float = theta) -> Any:
                return answer(*tensors, theta=base)

            output, held_k, held_v = _tensors(step, "step", given, q[t], k[t], v[t], held_k, held_v)
            _close("the output equals full attention with positions 0, 1, 2, ...", given, output, full[t])
            _close("the newest key is rotated by its own position", given, held_k, rotated[: t + 1])
            _close("values are not rotated", given, held_v, v[: t + 1])


@exercise("01.4", "The largest batch in a budget")
def _largest_batch(answer: Callable[..., Any]) -> None:
    for weights, workspace, per_token, n_tokens, block in itertools.product(
        (0, 10_000), (0, 300), (64, 100), (1, 31, 32, 33), (1, 16)
    ):
        one = (n_tokens + block - 1) // block * block * per_token + workspace
        for batch in (0, 1, 7):
            for spare in (0, one - 1):
                budget = weights + batch * one + spare
                given = {
                    "budget": budget,
                    "weights": weights,
                    "workspace_per_sequence": workspace,
                    "bytes_per_token": per_token,
                    "n_tokens": n_tokens,
                    "block_size": block,
                }
                expect_equal("the batch fits and the next larger one does not", given, answer(**given), batch)
    given = dict(budget=100, weights=1000, workspace_per_sequence=0, bytes_per_token=1, n_tokens=10, block_size=16)
    expect_equal("where the weights alone do not fit, the batch is 0", given, answer(**given), 0)


def _option(name: str, seconds: float, kl: float, per_token: int, residual: int = 0) -> dict[str, Any]:
    return {
        "name": name,
        "step_seconds": seconds,
        "kl": kl,
        "bytes_per_token": per_token,
        "residual_bytes_per_token": 100,
        "residual_tokens": residual,
    }


@exercise("01.5", "Choose a cache for a budget and a quality")
def _choose_cache(answer: Callable[..., Any]) -> None:
    plain, static = _option("dynamic", 1.0, 0.0, 100), _option("static", 0.8, 0.0, 160)
    eight, four = _option("8 bits", 1.5, 0.001, 60, 32), _option("4 bits", 1.5, 0.05, 30, 32)
    every = [plain, static, eight, four]
    cases: list[tuple[str, list[dict[str, Any]], int, int, float, str]] = [
        ("the fastest of those that fit", every, 1000, 10**6, 1.0, "static"),
        ("a cache over the budget is not chosen", every, 1000, 120_000, 1.0, "dynamic"),
        ("a cache of exactly the budget fits", every, 1000, 100_000, 1.0, "dynamic"),
        ("of equally fast caches the smaller", every, 1000, 70_000, 1.0, "4 bits"),
        ("a cache over the KL bound is not chosen", every, 1000, 70_000, 0.01, "8 bits"),
        ("a KL of exactly the bound is allowed", every, 1000, 70_000, 0.001, "8 bits"),
        ("the newest tokens count in full precision", [eight], 1000, 60_000, 1.0, "none"),
        ("a text inside the residual window has no older tokens", [four], 20, 2_000, 1.0, "4 bits"),
        ("a text inside the residual window saves nothing", [four], 20, 1_999, 1.0, "none"),
        ('where nothing fits the answer is "none"', every, 1000, 1_000, 1.0, "none"),
    ]
    for prop, options, n_tokens, budget, max_kl, expected in cases:
        for order in (options, options[::-1]):
            given = f"{[o['name'] for o in order]}, n_tokens={n_tokens}, budget={budget}, max_kl={max_kl}"
            try:
                got = answer([dict(o) for o in order], n_tokens, budget, max_kl)
            except (ValueError, IndexError, TypeError) as error:
                raise Mismatch(prop, given, expected, f"{type(error).__name__}: {error}") from None
            expect_equal(prop, given, got, expected)
