"""Checks of notebook 01's exercises: the KV cache's size, a cached step, its positions, and what fits into a budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from helpers.exercises import Answer, Mismatch, exercise, expect, expect_equal


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
    call = Answer(answer)
    for prop, config, n_tokens, width, expected in cases:
        given = f"config={config}, n_tokens={n_tokens}, bytes_per_element={width}"
        expect_equal(prop, given, call(prop, given, expected, dict(config), n_tokens, width), expected)


def _tensor(value: Any) -> torch.Tensor:
    """A tensor, an array, or nested lists of either, as a float tensor. Raises what Torch raises for anything else."""
    if isinstance(value, list | tuple) and any(isinstance(row, torch.Tensor) for row in value):
        value = torch.stack([_tensor(row) for row in value])
    return torch.as_tensor(value, dtype=torch.float32).detach()


def _described(value: Any) -> str:
    """What a step returned, in the words of its parts."""
    kind = type(value).__name__
    if not isinstance(value, tuple | list):
        return f"one {kind}"
    return f"a {kind} of {len(value)}: ({', '.join(type(part).__name__ for part in value)})"


def _step(call: Answer, prop: str, given: str, *arguments: Any) -> list[torch.Tensor]:
    """Call a student's step and demand what can be read as three tensors, the inputs left as they were."""
    shape, wanted = "output, new_k and new_v are returned", "a tuple of 3: (output, new_k, new_v)"
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    result = call(prop, given, "no error", *arguments)
    expect(shape, given, isinstance(result, tuple | list) and len(result) == 3, wanted, _described(result))
    same = all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    expect("the inputs are not changed", given, same, "unchanged inputs", "changed inputs")
    try:
        return [_tensor(part) for part in result]
    except (TypeError, ValueError, RuntimeError):
        raise Mismatch("output, new_k and new_v are tensors", given, "three tensors", _described(result)) from None


def _close(prop: str, given: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    expect(f"{prop} (shape)", given, got.shape == expected.shape, tuple(expected.shape), tuple(got.shape))
    worst = float((got - expected).abs().max()) if expected.numel() else 0.0
    expect(prop, given, worst <= 1e-5, "a difference of at most 1e-5", f"{worst:.2e}")


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Reference: causal attention of one head over ``[n, head_dim]``."""
    return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


@exercise("01.2", "One cached step of one head")
def _cached_step(answer: Callable[..., Any]) -> None:
    call, prop = Answer(answer), "the output equals full causal attention"
    generator = torch.Generator().manual_seed(12)
    for n_tokens, head_dim in ((1, 4), (5, 8), (9, 16)):
        q, k, v = (torch.randn(n_tokens, head_dim, generator=generator) for _ in range(3))
        full = _attention(q, k, v)
        held_k, held_v = k[:0], v[:0]
        for t in range(n_tokens):
            given = f"token {t} of {n_tokens}: q, k, v [{head_dim}], cached_k, cached_v [{t}, {head_dim}]"
            output, held_k, held_v = _step(call, prop, given, q[t], k[t], v[t], held_k, held_v)
            _close("the cache holds all keys up to and with the newest", given, held_k, k[: t + 1])
            _close("the cache holds all values up to and with the newest", given, held_v, v[: t + 1])
            _close(prop, given, output, full[t])


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
def _rope_step(answer: Callable[..., Any]) -> None:
    call, prop = Answer(answer), "the output equals full attention with positions 0, 1, 2, ..."
    generator = torch.Generator().manual_seed(13)
    for n_prefill, n_steps, head_dim, theta in ((0, 3, 8, 1e4), (1, 2, 8, 1e4), (6, 3, 16, 1e5), (40, 2, 4, 500.0)):
        n = n_prefill + n_steps
        q, k, v = (torch.randn(n, head_dim, generator=generator) for _ in range(3))
        rotated = _rotate(k, 0, theta)
        full = _attention(_rotate(q, 0, theta), rotated, v)
        held_k, held_v = rotated[:n_prefill], v[:n_prefill]
        for t in range(n_prefill, n):
            given = f"position {t} after a prefill of {n_prefill}, head_dim {head_dim}, theta {theta:g}"
            output, held_k, held_v = _step(call, prop, given, q[t], k[t], v[t], held_k, held_v, theta)
            _close(prop, given, output, full[t])
            _close("the newest key is rotated by its own position", given, held_k, rotated[: t + 1])
            _close("values are not rotated", given, held_v, v[: t + 1])


@exercise("01.4", "The largest batch in a budget")
def _largest_batch(answer: Callable[..., Any]) -> None:
    call, prop = Answer(answer), "the batch fits and the next larger one does not"
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
                expect_equal(prop, given, call(prop, given, batch, *given.values()), batch)
    prop = "where the weights alone do not fit, the batch is 0"
    given = dict(budget=100, weights=1000, workspace_per_sequence=0, bytes_per_token=1, n_tokens=10, block_size=16)
    expect_equal(prop, given, call(prop, given, 0, *given.values()), 0)


def _option(
    name: str, seconds: float, kl: float, per_token: int, residual: int = 0, residual_bytes: int = 100
) -> dict[str, Any]:
    return {
        "name": name,
        "step_seconds": seconds,
        "kl": kl,
        "bytes_per_token": per_token,
        "residual_bytes_per_token": residual_bytes,
        "residual_tokens": residual,
    }


def _shown(option: dict[str, Any]) -> str:
    """An option in one phrase."""
    newest = f", the newest {option['residual_tokens']} tokens {option['residual_bytes_per_token']} B each"
    size = f"{option['bytes_per_token']} B a token{newest if option['residual_tokens'] else ''}"
    return f"{option['name']!r} ({option['step_seconds']} s, KL {option['kl']}, {size})"


@exercise("01.5", "Choose a cache for a budget and a quality")
def _choose_cache(answer: Callable[..., Any]) -> None:
    plain, static = _option("dynamic", 1.0, 0.0, 100), _option("static", 0.8, 0.0, 160)
    eight, four = _option("8 bits", 1.5, 0.001, 60, 32), _option("4 bits", 1.5, 0.05, 30, 32)
    every = [plain, static, eight, four]
    lasting, wide = _option("long residual", 1.5, 0.05, 30, 512), _option("wide residual", 1.5, 0.05, 60, 32, 200)
    flat = _option("no residual", 1.5, 0.001, 60)
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
        ("each cache has its own residual window", [lasting], 1000, 65_839, 1.0, "none"),
        ("the newest tokens take residual_bytes_per_token", [wide], 1000, 64_479, 1.0, "none"),
        ("a cache of exactly the budget fits, residual included", [wide], 1000, 64_480, 1.0, "wide residual"),
        (
            "of equally fast caches the smaller in all, residual included",
            [lasting, flat],
            1000,
            10**6,
            1.0,
            "no residual",
        ),
        ("among equally fast caches it is size, not KL, that counts", [eight, four], 1000, 10**6, 1.0, "4 bits"),
        ('where nothing fits the answer is "none"', every, 1000, 1_000, 1.0, "none"),
    ]
    call = Answer(answer)
    for prop, options, n_tokens, budget, max_kl, expected in cases:
        for order in (options, options[::-1]):
            given = f"[{', '.join(map(_shown, order))}], n_tokens={n_tokens}, budget={budget}, max_kl={max_kl}"
            got = call(prop, given, repr(expected), [dict(o) for o in order], n_tokens, budget, max_kl)
            expect_equal(prop, given, got, expected)
