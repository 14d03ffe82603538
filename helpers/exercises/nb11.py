"""Checks of notebook 11's exercises: codes for each token, smoothed values, a rotated block, a protective range, an alpha."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from helpers.exercises import Answer, Mismatch, exercise, expect, expect_equal, not_finite


def _tensors(prop: str, given: object, got: Any, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """The items of a tuple or list as float64 tensors of these shapes, all of them finite."""
    expected = f"{len(shapes)} tensors of the shapes {', '.join(str(list(shape)) for shape in shapes)}"
    expect(prop, given, isinstance(got, (tuple, list)), expected, type(got).__name__)
    expect(prop, given, len(got) == len(shapes), expected, f"{len(got)} items")
    parts = []
    for item, shape in zip(got, shapes, strict=True):
        try:
            part = torch.as_tensor(item).detach().to("cpu", torch.float64)
        except NotImplementedError:
            raise
        except Exception as error:
            raise Mismatch(prop, given, expected, f"{type(item).__name__} ({type(error).__name__})") from error
        expect(prop, given, tuple(part.shape) == shape, expected, f"shape {list(part.shape)}")
        expect(f"{prop}, all finite", given, bool(torch.isfinite(part).all()), "no NaN, no infinity", not_finite(part))
        parts.append(part)
    return parts


def _close(prop: str, given: object, got: torch.Tensor, expected: torch.Tensor, rel: float = 1e-5) -> None:
    """Demand closeness, relative to the largest element expected."""
    bound = rel * max(float(expected.abs().max()), 1e-12)
    expect(prop, given, float((got - expected).abs().max()) <= bound, expected, got)


# -- 11.1 ---------------------------------------------------------------------------------------------------------------
@exercise("11.1", "Codes and a scale for each token")
def _quantize_tokens(answer: Callable[..., Any]) -> None:
    ask, generator = Answer(answer), torch.Generator().manual_seed(111)
    plain = torch.randn(5, 12, generator=generator)
    outlier = plain.clone()
    outlier[2, 7] = -900.0
    zero = plain.clone()
    zero[[0, 3]] = 0.0
    cases = [
        ("values are rounded to the nearest code of their token", "five ordinary tokens", plain),
        ("one token's outlier is nobody else's business", "token 2 holds -900", outlier),
        ("a token that is all zero has codes 0 and the scale 1", "tokens 0 and 3 are all zero", zero),
        ("a single token keeps its dimension", "one token", plain[:1]),
        ("tiny values have tiny scales", "values around 1e-6", plain * 1e-6),
        ("large values are no reason to clip", "values around 1e6", plain * 1e6),
        ("a token of one channel", "one channel", plain[:, :1]),
        ("negative extremes count as much as positive ones", "all negative", -plain.abs()),
    ]
    for prop, given, x in cases:
        rows = x.double()
        largest = rows.abs().amax(dim=1, keepdim=True)
        scales = torch.where(largest > 0, largest / 127, 1.0)
        got = ask(prop, given, scales, x.clone())
        codes, got_scales = _tensors("codes and scales are returned", given, got, [tuple(x.shape), (len(x), 1)])
        _close(f"{prop} (scales)", given, got_scales, scales)
        for row in range(len(x)):  # relative to the token's own scale, so that no outlier hides another token
            name = f"{given}, token {row}"
            same = abs(float(got_scales[row]) / float(scales[row]) - 1) < 1e-5
            wanted, came = float(scales[row]), float(got_scales[row])
            expect("a token's scale is its largest magnitude over 127", name, same, wanted, came)
        whole = bool((codes == codes.round()).all()) and float(codes.abs().max()) <= 127
        expect("codes are whole numbers from -127 to 127", given, whole, "whole numbers from -127 to 127", codes)
        dtype = getattr(got[0], "dtype", None)
        expect("codes are int8", given, str(dtype).endswith("int8") and "uint" not in str(dtype), "int8", str(dtype))
        off = (codes - rows / scales).abs().max()
        expect(prop, given, float(off) <= 0.5 + 1e-3, "at most half a code away", f"{float(off):.3f} codes away")


# -- 11.2 ---------------------------------------------------------------------------------------------------------------
def _attended(x: torch.Tensor, v: torch.Tensor, o: torch.Tensor, n_kv_heads: int) -> torch.Tensor:
    """What attention that looks at one token puts out: values, spread to query heads, through o. In float64."""
    head_dim = len(v) // n_kv_heads
    values = (x @ v.T).view(len(x), n_kv_heads, 1, head_dim)
    q_per_kv = o.shape[1] // len(v)
    return values.expand(-1, -1, q_per_kv, -1).reshape(len(x), -1) @ o.T


@exercise("11.2", "Smoothing between values and o_proj under GQA")
def _smooth_values(answer: Callable[..., Any]) -> None:
    ask, generator = Answer(answer), torch.Generator().manual_seed(112)
    shapes = [(1, 1, 4, 6), (2, 3, 4, 10), (3, 3, 8, 12), (2, 2, 5, 7), (4, 1, 3, 9)]
    for (n_kv_heads, q_per_kv, head_dim, hidden), alpha in [(s, a) for s in shapes for a in (0.5, 0.8, 0.0, 1.0)]:
        v = torch.randn(n_kv_heads * head_dim, hidden, generator=generator)
        o = torch.randn(hidden, n_kv_heads * q_per_kv * head_dim, generator=generator)
        top = torch.rand(o.shape[1], generator=generator) * 4 + 0.1
        top[1] = 500.0
        if (
            alpha == 0.5 and n_kv_heads > 1
        ):  # channel 2 of the first KV head is never used, channel 0 of the last is not read
            top.view(n_kv_heads, q_per_kv, head_dim)[0, :, 2] = 0.0
            o.view(hidden, n_kv_heads, q_per_kv, head_dim)[:, -1, :, 0] = 0.0
        given = (
            f"n_kv_heads={n_kv_heads}, {n_kv_heads * q_per_kv} query heads, head_dim={head_dim}, hidden={hidden}, "
            f"alpha={alpha}"
        )
        x_max = top.double().view(n_kv_heads, q_per_kv, head_dim).amax(dim=1)
        w_max = o.double().abs().amax(dim=0).view(n_kv_heads, q_per_kv, head_dim).amax(dim=1)
        s = torch.ones_like(x_max)
        live = (x_max > 0) & (w_max > 0)
        s[live] = x_max[live] ** alpha / w_max[live] ** (1 - alpha)
        expected_v = v.double() / s.view(-1, 1)
        got = ask("smoothing", given, expected_v, v.clone(), o.clone(), top.clone(), n_kv_heads, alpha)
        new_v, new_o = _tensors("both weights are returned", given, got, [tuple(v.shape), tuple(o.shape)])
        x = torch.randn(9, hidden, generator=generator).double()
        before, after = _attended(x, v.double(), o.double(), n_kv_heads), _attended(x, new_v, new_o, n_kv_heads)
        _close("what attention puts out does not change", given, after, before)
        columns = s[:, None].expand(-1, q_per_kv, -1).flatten()
        for row in range(len(s.flatten())):
            ratio = new_v[row].norm() / expected_v[row].norm()
            prop = "a value channel's scale is x^alpha / w^(1 - alpha), 1 where either is zero"
            where = f"{given}, channel {row % head_dim} of KV head {row // head_dim}"
            expect(prop, where, abs(float(ratio) - 1) < 1e-4, expected_v[row], new_v[row])
        _close("rows of v are divided", given, new_v, expected_v)
        _close("columns of o are multiplied", given, new_o, o.double() * columns)


# -- 11.3 ---------------------------------------------------------------------------------------------------------------
def _block(h: torch.Tensor, g: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor) -> torch.Tensor:
    """The exercise's block in float64."""
    normed = h / (h.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt() * g
    return h + (normed @ w_in.T).relu() @ w_out.T


@exercise("11.3", "Find the bug: a rotation before a norm's scale was folded")
def _rotate_block(answer: Callable[..., Any]) -> None:
    ask, generator = Answer(answer), torch.Generator().manual_seed(113)
    for what, n, m in (
        ("a trained norm: every channel has its own scale", 8, 12),
        ("a trained norm, more channels", 24, 16),
        ("a norm with negative and zero scales", 12, 12),
        ("a fresh norm: all scales are 1", 8, 8),
        ("a norm with one common scale of 3", 8, 12),
        ("the identity as rotation", 8, 12),
        ("a permutation as rotation", 10, 12),
    ):
        g = torch.rand(n, generator=generator) * 3 + 0.2
        if "negative" in what:
            g[1], g[2] = -1.5, 0.0
        g = torch.ones(n) if "fresh" in what else torch.full((n,), 3.0) if "common" in what else g
        w_in, w_out = torch.randn(m, n, generator=generator), torch.randn(n, m, generator=generator)
        rotation = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0].float()
        if "identity" in what:
            rotation = torch.eye(n)
        if "permutation" in what:
            rotation = torch.eye(n)[torch.randperm(n, generator=generator)]
        given = f"{what}; n={n}, m={m}, g={[round(float(v), 2) for v in g[:6]]} ..."
        got = ask("the rotated block", given, "three tensors", g.clone(), w_in.clone(), w_out.clone(), rotation.clone())
        parts = _tensors("g, w_in and w_out are returned", given, got, [(n,), (m, n), (n, m)])
        h = torch.randn(7, n, generator=generator).double() * torch.logspace(-1, 1, 7).double()[:, None]
        expected = _block(h, g.double(), w_in.double(), w_out.double()) @ rotation.double()
        prop = f"the rotated block on the rotated stream gives the rotated output: {what}"
        _close(prop, given, _block(h @ rotation.double(), *parts), expected, rel=1e-4)


# -- 11.4 ---------------------------------------------------------------------------------------------------------------
def _top_by_trial(bits: int, limit: int) -> int:
    """Reference: every value of every group, all groups at once, from the smallest reach up."""
    codes = 2**bits - 1
    low, high = torch.meshgrid(torch.arange(-limit, 1).double(), torch.arange(limit + 1).double(), indexing="ij")
    scale = ((high - low) / codes).round().clamp(min=1)
    zero = (-low / scale).round().clamp(0, codes)
    bad = torch.zeros(low.shape, dtype=torch.bool)
    for value in range(-limit, limit + 1):
        back = (((value / scale).round() + zero).clamp(0, codes) - zero) * scale
        bad |= (value >= low) & (value <= high) & ((back > limit) | (back < -limit - 1))
    reach = torch.maximum(-low, high)[bad]
    return int(reach.min()) - 1 if len(reach) else limit


@exercise("11.4", "The protective range of progressive quantization")
def _protective_top(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    for prop, bits, limit in (
        ("QServe's own case: four bits inside of int8", 4, 127),
        ("three bits inside of int8", 3, 127),
        ("two bits inside of int8", 2, 127),
        ("five bits inside of int8", 5, 127),
        ("four bits inside of seven", 4, 63),
        ("three bits inside of six", 3, 31),
        ("two bits inside of four", 2, 7),
        ("as many bits as the limit has: nothing can overflow", 5, 15),
        ("a limit that is no power of two", 4, 100),
        ("a limit that is no power of two", 3, 50),
        ("ties are rounded to even", 4, 42),
        ("ties are rounded to even", 3, 28),
    ):
        expected = _top_by_trial(bits, limit)
        given = f"bits={bits}, limit={limit}: integers from {-limit - 1} to {limit}"
        expect_equal(prop, given, ask(prop, given, expected, bits, limit), expected)


# -- 11.5 ---------------------------------------------------------------------------------------------------------------
MISTAKES = {
    "a scale of its own for each token of x": "dynamic",
    "inputs that are not clipped": "unclipped",
    "smoothing scales from x": "smoothing from x",
    "the input's scale from x": "scale from x",
    "all scales from x": "all from x",
    "the sum of absolute errors": "l1",
    "one scale for the whole weight": "weight by tensor",
    "weights that are not rounded": "weight as it is",
    "alpha and 1 - alpha exchanged": "sides exchanged",
    "the largest error": "largest",
}
"""What may have been done instead, in words, and its name in `_smoothed_errors`."""


def _smoothed_errors(
    x_fit: torch.Tensor, x: torch.Tensor, w: torch.Tensor, alphas: Sequence[float], mistake: str = ""
) -> list[float]:
    """Reference: output errors in float64, or what they are with one of `MISTAKES`."""
    x_fit, x, w = x_fit.double(), x.double(), w.double()
    for_smoothing = x if mistake in ("smoothing from x", "all from x") else x_fit
    for_scale = x if mistake in ("scale from x", "all from x") else x_fit
    errors = []
    for alpha in alphas:
        s = torch.ones(w.shape[1], dtype=torch.float64)
        for j in range(len(s)):
            a, b = float(for_smoothing[:, j].abs().max()), float(w[:, j].abs().max())
            if a > 0 and b > 0:
                s[j] = a ** (1 - alpha) / b**alpha if mistake == "sides exchanged" else a**alpha / b ** (1 - alpha)
        step = (for_scale / s).abs().max() / 127
        if mistake == "dynamic":
            step = ((x / s).abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-300)
        steps = ((w * s).abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-300)
        steps = steps.max() if mistake == "weight by tensor" else steps
        codes = (x / s / step).round()
        x_hat = (codes if mistake == "unclipped" else codes.clamp(-127, 127)) * step
        w_hat = w * s if mistake == "weight as it is" else (w * s / steps).round() * steps
        wrong = x_hat @ w_hat.T - x @ w.T
        errors.append(float(wrong.abs().sum() if mistake == "l1" else wrong.norm()))
    return [-error for error in errors] if mistake == "largest" else errors


def _as_with(cases: Sequence[tuple[Any, ...]], answers: Sequence[Any]) -> str:
    """Which of `MISTAKES` give nearly all of these answers (a near tie may fall either way), in words, or nothing."""
    agree = {}
    for words, mistake in MISTAKES.items():
        same = []
        for (x_fit, x, w, alphas), got in zip(cases, answers, strict=True):
            errors = _smoothed_errors(x_fit, x, w, alphas, mistake)
            same.append(_same(got, alphas[min(range(len(errors)), key=errors.__getitem__)]))
        agree[words] = sum(same) / len(same)
    best = max(agree.values())
    return " or ".join(words for words, share in agree.items() if share == best) if best >= 0.9 else ""


def _same(got: Any, expected: float) -> bool:
    try:
        return bool(got == expected)
    except (TypeError, ValueError, RuntimeError):
        return False


@exercise("11.5", "The best alpha of a layer")
def _best_alpha(answer: Callable[..., Any]) -> None:
    ask, generator = Answer(answer), torch.Generator().manual_seed(115)
    ladder = [0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0]
    kinds = ["ordinary inputs", "outlier channels in the input", "outlier channels in the weight", "outliers in both"]
    kinds += ["a channel that is never used", "a channel with zero weights", "a calibration text without the outlier"]
    cases, results = [], []
    for round_, what in enumerate(kinds * 4):
        alphas = [ladder[i] for i in torch.randperm(len(ladder), generator=generator)[: 3 + round_ % 5].tolist()]
        n_in, n_out = 24, 16
        x_fit, x = (torch.randn(40, n_in, generator=generator) for _ in range(2))
        w = torch.randn(n_out, n_in, generator=generator) * 0.1
        if what not in ("ordinary inputs", "outlier channels in the weight"):
            factor = torch.ones(n_in)
            factor[[3, 11]] = torch.rand(2, generator=generator) * 200 + 20
            x_fit, x = x_fit * factor, x * factor
        if "in the weight" in what or "both" in what:
            w[:, [5, 11]] *= 60
        if "never" in what:
            x_fit[:, 7] = 0.0
            x[:, 7] = 0.0
        if "zero weights" in what:
            w[:, 9] = 0.0
        if "without" in what:
            x[:, 3] *= 40
        errors = _smoothed_errors(x_fit, x, w, alphas)
        best = min(range(len(alphas)), key=errors.__getitem__)
        others = [e for i, e in enumerate(errors) if i != best]
        if min(others) < 1.02 * errors[best]:
            continue  # too close to call in float32
        shown = ", ".join(f"{a}: {e:.4g}" for a, e in zip(alphas, errors, strict=True))
        given = f"{what}; x_fit [40, {n_in}], w [{n_out}, {n_in}]; errors by alpha: {shown}"
        prop = f"the alpha with the smallest output error: {what}"
        got = ask(prop, given, alphas[best], x_fit.clone(), x.clone(), w.clone(), list(alphas))
        cases.append((x_fit, x, w, alphas))
        results.append((prop, given, alphas[best], got))
    assert len(cases) >= 12 and len({best for _, _, best, _ in results}) >= 3, "the cases must tell right from wrong"
    for prop, given, best, got in results:  # all cases are asked first: together they tell one mistake from another
        if not _same(got, best):
            hint = _as_with(cases, [got for *_, got in results])
            raise Mismatch(prop, given, repr(best), f"{got!r}{f' (as with {hint})' if hint else ''}")
