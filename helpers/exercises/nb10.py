"""Checks of notebook 10's exercises: a checkpoint's bytes, a grid's zero, one step of GPTQ, folded scales, bits by layer."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from helpers.exercises import Answer, Mismatch, exercise, expect, expect_equal, not_finite

if TYPE_CHECKING:
    import torch


def _matrix(prop: str, given: object, got: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """An answer as a float64 tensor of this shape, all its values finite."""
    import torch

    expected = f"a tensor of shape {list(shape)}"
    try:
        value = torch.as_tensor(got).detach().to("cpu", torch.float64)
    except NotImplementedError:
        raise
    except Exception as error:
        raise Mismatch(prop, given, expected, f"{type(got).__name__} ({type(error).__name__}: {error})") from error
    expect(prop, given, tuple(value.shape) == shape, expected, f"shape {list(value.shape)}")
    expect(
        "every value is a number", given, bool(torch.isfinite(value).all()), "no NaN, no infinity", not_finite(value)
    )
    return value


def _parts(prop: str, given: object, got: Any, n: int) -> list[Any]:
    """The items of an answer that must be a tuple or list of `n`."""
    expected = f"{n} tensors"
    expect(prop, given, isinstance(got, (tuple, list)), expected, type(got).__name__)
    expect(prop, given, len(got) == n, expected, f"{len(got)} items")
    return list(got)


def _close(prop: str, given: object, got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Demand closeness of two tensors, relative to the largest value expected."""
    scale = max(1e-12, float(expected.abs().max())) if expected.numel() else 1.0
    good = float((got - expected).abs().max()) <= tolerance * scale if expected.numel() else True
    expect(prop, given, good, expected, got)


# -- 10.1 ---------------------------------------------------------------------------------------------------------------
@exercise("10.1", "Bytes of a quantized checkpoint")
def _bytes(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    cases: list[tuple[str, list[tuple[int, int]], int, int, bool, int]] = [
        ("four bits are half a byte, a scale two bytes", [(8, 64)], 4, 64, True, 0),
        ("each group has a scale", [(8, 128)], 4, 32, True, 0),
        ("an asymmetric grid stores a zero for each group", [(8, 128)], 4, 32, False, 0),
        ("zeros run on from row to row", [(8, 96)], 4, 32, False, 0),
        ("-1 is one group for each row", [(16, 96)], 4, -1, False, 0),
        ("three bits are packed without gaps", [(8, 64)], 3, 64, True, 0),
        ("codes of a layer end at a whole byte", [(1, 33)], 3, 33, True, 0),
        ("codes run on from row to row", [(2, 33)], 3, 33, True, 0),
        ("zeros of a layer end at a whole byte", [(3, 32)], 3, 32, False, 0),
        ("each layer begins at a new byte", [(1, 33), (1, 33), (1, 35)], 3, -1, False, 0),
        ("other elements have two bytes", [(8, 64)], 4, 64, True, 1000),
        ("no quantized layer, other elements only", [], 4, 64, True, 7),
        ("a large model", [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)], 4, 128, False, 131_072_000),
    ]
    rng = random.Random(1)
    for _ in range(20):
        bits, size = rng.choice((2, 3, 4, 8)), rng.choice((16, 24, 32, -1))
        shapes = [(rng.randint(1, 40), (size if size > 0 else 1) * rng.randint(1, 9)) for _ in range(rng.randint(1, 4))]
        cases.append(("random layers", shapes, bits, size, rng.random() < 0.5, rng.randint(0, 500)))
    for prop, shapes, bits, size, symmetric, other in cases:
        expected = 2 * other
        for n_out, n_in in shapes:
            groups = n_out * (n_in // (n_in if size == -1 else size))
            expected += math.ceil(Fraction(n_out * n_in * bits, 8)) + 2 * groups
            expected += 0 if symmetric else math.ceil(Fraction(groups * bits, 8))
        given = {"shapes": shapes, "bits": bits, "group_size": size, "symmetric": symmetric, "other_elements": other}
        got = ask(prop, given, expected, list(shapes), bits, size, symmetric, other)
        expect_equal(prop, given, got, expected)


# -- 10.2 ---------------------------------------------------------------------------------------------------------------
@exercise("10.2", "Find the bug: a zero that is no code")
def _zeros(answer: Callable[..., Any]) -> None:
    import torch

    ask, rng = Answer(answer), torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    cases: list[tuple[str, torch.Tensor]] = [
        ("rows around zero", normal(4, 32)),
        ("rows of positive values", 5 + normal(4, 32).abs()),
        ("rows of negative values", -3 - normal(4, 32).abs()),
        ("a row of zeros beside others", torch.cat([normal(2, 32), torch.zeros(1, 32)])),
        ("rows of one positive value", torch.full((2, 8), 0.75)),
        ("rows of one negative value", torch.full((2, 8), -0.75)),
        ("rows that end at zero", normal(4, 32).abs() * torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])),
        ("small values", 1e-4 * normal(4, 32)),
        ("values far from zero with a small spread", 100 + 0.01 * normal(4, 32)),
        ("rows of different kinds", torch.cat([normal(1, 16), 7 + normal(1, 16).abs(), torch.zeros(1, 16)])),
        ("one outlier in a row", torch.cat([normal(3, 31), torch.tensor([[40.0], [-40.0], [0.0]])], dim=1)),
    ]
    for bits, (prop, w) in itertools.product((2, 3, 4, 8), cases):
        n, m = w.shape
        given, top = f"bits={bits}, {prop}: from {w.min():.4g} to {w.max():.4g}, shape {list(w.shape)}", 2**bits - 1
        before = w.clone()
        got = ask(prop, given, "codes, scales, zeros", w, bits)
        shape = "the answer is (codes, scales, zeros) of shapes [n, m], [n, 1], [n, 1]"
        parts = _parts(shape, given, got, 3)
        codes, scales, zeros = (
            _matrix(shape, given, p, s) for p, s in zip(parts, ((n, m), (n, 1), (n, 1)), strict=True)
        )
        expect("the given weights stay as they are", given, bool(torch.equal(w, before)), "unchanged", "changed")
        for what, values in (("codes", codes), ("zeros", zeros)):
            whole = bool((values == values.round()).all() and (values >= 0).all() and (values <= top).all())
            expect(f"{what} are whole numbers from 0 to 2**bits - 1", given, whole, f"0 ... {top}", values)
        expect("scales are positive", given, bool((scales > 0).all()), "> 0", scales)
        exact = w.double()
        low, high = exact.amin(1, keepdim=True).clamp(max=0), exact.amax(1, keepdim=True).clamp(min=0)
        extent, has_extent = high - low, (high > low)
        reach = torch.where(has_extent, scales * top / extent, torch.ones_like(extent))
        loose = 1e-4 + torch.where(has_extent, 2e-8 * top / extent, torch.zeros_like(extent))  # "+ 1e-8" against 0 / 0
        expected = "scale * (2**bits - 1) over that range, in each row: 1"
        grid = f"{prop}: a grid reaches from min(0, smallest) to max(0, largest), no further"
        expect(grid, given, bool(((reach - 1).abs() <= loose).all()), expected, reach)
        value = scales * (codes - zeros)
        errors = torch.where(has_extent, (value - exact).abs() / scales, (value - exact).abs())
        worst = float(errors.max())
        expect(f"{prop}: no error is larger than one step", given, worst <= 1.001, "<= 1 step", f"{worst:.3f} steps")
        inside = (codes > 0) & (codes < top)
        worst = float(errors[inside].max()) if bool(inside.any()) else 0.0
        slack = 1e-3 + 1e-6 * float((exact.abs() / scales).max())
        nearest = f"{prop}: a code that is not the first or last is the nearest"
        expect(nearest, given, worst <= 0.5 + slack, "<= half a step", f"{worst:.3f} steps")
        constant = (exact.amax(1) == exact.amin(1)) | ~has_extent[:, 0]
        if bool(constant.any()):
            _close(f"{prop}: zeros and constants are exact", given, value[constant], exact[constant], 1e-5)


# -- 10.3 ---------------------------------------------------------------------------------------------------------------
@exercise("10.3", "One step of GPTQ")
def _step(answer: Callable[..., Any]) -> None:
    import torch

    ask, rng = Answer(answer), torch.Generator().manual_seed(3)
    sizes = ((1, 2, 0), (3, 6, 0), (3, 6, 2), (3, 6, 4), (3, 6, 5), (1, 1, 0), (5, 24, 7), (2, 24, 23), (8, 6, 1))
    for n_out, n_in, j in sizes:
        inputs = torch.randn(4 * n_in, n_in, generator=rng, dtype=torch.float64)
        inputs = inputs @ torch.randn(n_in, n_in, generator=rng, dtype=torch.float64)
        hessian = 2 * inputs.T @ inputs / len(inputs) + 0.05 * torch.eye(n_in, dtype=torch.float64)
        w, scale = torch.randn(n_out, n_in, generator=rng, dtype=torch.float64), 0.4
        w *= 5 if n_out == 8 else 1  # many steps: no one spoke of a range of codes
        expected = w.clone()
        expected[:, j] = (w[:, j] / scale).round() * scale
        free = slice(j + 1, n_in)
        if j + 1 < n_in:
            moved = torch.linalg.solve(hessian[free, free], hessian[free, j])
            expected[:, free] += (w[:, j] - expected[:, j])[:, None] * moved
        given = f"w of shape [{n_out}, {n_in}], j={j}, scale={scale}; a random positive definite Hessian"
        mine, its = w.clone(), hessian.clone()
        got = _matrix(
            "the answer is a new w", given, ask("one step", given, expected, mine, its, scale, j), (n_out, n_in)
        )
        expect("w and hessian stay as they are", given, bool(torch.equal(mine, w)), "w unchanged", "w changed")
        expect("w and hessian stay as they are", given, bool(torch.equal(its, hessian)), "unchanged", "hessian changed")
        _close("columns before j do not change", given, got[:, :j], w[:, :j], 1e-12)
        _close("column j is rounded to a multiple of scale", given, got[:, j], expected[:, j])
        _close("columns after j make the error at the output as small as it can be", given, got, expected, 1e-6)


# -- 10.4 ---------------------------------------------------------------------------------------------------------------
@exercise("10.4", "Fold scales into an MLP")
def _fold(answer: Callable[..., Any]) -> None:
    import torch

    ask, rng = Answer(answer), torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def mlp(weights: list[torch.Tensor], h: torch.Tensor) -> torch.Tensor:
        norm, gate, up, down = weights
        x = norm * h
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    for d, m in ((1, 1), (4, 4), (3, 7), (8, 5)):
        given_weights = [normal(d), normal(m, d), normal(m, d), normal(d, m)]
        ones = (torch.ones(d, dtype=torch.float64), torch.ones(m, dtype=torch.float64))
        scales = [ones, (0.2 + normal(d).abs(), ones[1]), (ones[0], 0.2 + normal(m).abs())]
        scales.append((0.2 + normal(d).abs(), 0.2 + normal(m).abs()))
        for (s_in, s_mid), what in zip(scales, ("no scales", "s_in alone", "s_mid alone", "both"), strict=True):
            given = f"{what}; d={d}, m={m}, s_in={s_in.tolist()}, s_mid={s_mid.tolist()}"
            before = [w.clone() for w in given_weights]
            got = ask("fold", given, "norm, gate, up, down", *given_weights, s_in.clone(), s_mid.clone())
            parts = _parts("the answer is (norm, gate, up, down)", given, got, 4)
            shape = "the four weights keep their shapes"
            new = [_matrix(shape, given, p, tuple(w.shape)) for p, w in zip(parts, given_weights, strict=True)]
            same = all(bool(torch.equal(a, b)) for a, b in zip(given_weights, before, strict=True))
            expect("the given weights stay as they are", given, same, "unchanged", "changed")
            h = normal(16, d)
            apart = float((mlp(new, h) - mlp(before, h)).abs().max() / mlp(before, h).abs().max())
            dtypes = ", ".join(sorted({str(getattr(p, "dtype", type(p).__name__)) for p in parts}))
            got_text = f"{apart:.1e}, from weights of {dtypes}"
            most = "a largest difference of at most 1e-9 of the largest output, in float64 as given"
            expect(f"the output does not change ({what})", given, apart <= 1e-9, most, got_text)
            _close("the columns of gate are multiplied by s_in", given, new[1], before[1] * s_in, 1e-9)
            _close("the columns of down are multiplied by s_mid", given, new[3], before[3] * s_mid, 1e-9)
            _close("up has the columns of s_in and the rows of s_mid", given, new[2] * s_mid[:, None], before[2] * s_in)


# -- 10.5 ---------------------------------------------------------------------------------------------------------------
Choices = list[dict[int, float]]


def _by_table(sizes: list[int], errors: Choices, budget: int) -> tuple[float, int] | None:
    """Reference: least error and, of equally good ones, least bits, over a table of all totals."""
    least: list[tuple[float, int] | None] = [(0.0, 0)] * (budget + 1)
    for size, choices in zip(sizes, errors, strict=True):
        new: list[tuple[float, int] | None] = []
        for room in range(budget + 1):
            ways = []
            for bits, error in choices.items():
                before = least[room - bits * size] if room >= bits * size else None
                if before is not None:
                    ways.append((round(before[0] + error, 9), before[1] + bits * size))
            new.append(min(ways, default=None))
        least = new
    return least[budget]


@exercise("10.5", "Bits by layer under a budget")
def _best_bits(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    cases: list[tuple[str, list[int], Choices, int]] = [
        ("all may have the most bits", [1, 1], [{2: 1.0, 4: 0.1}, {2: 1.0, 4: 0.1}], 8),
        ("the layer that gains more gets them", [1, 1], [{2: 1.0, 4: 0.9}, {2: 1.0, 4: 0.1}], 6),
        ("a budget met exactly is met", [2, 3], [{2: 1.0, 4: 0.0}, {2: 1.0, 4: 0.0}], 16),
        ("a large layer costs more bits", [10, 1], [{2: 1.0, 4: 0.0}, {2: 0.9, 4: 0.0}], 24),
        (
            "the best gain for each bit first is not best",
            [3, 2, 2],
            [{2: 1.0, 4: 0.0}, {2: 0.6, 4: 0.0}, {2: 0.6, 4: 0.0}],
            22,
        ),
        ("more bits may be worse", [1, 1], [{2: 0.5, 3: 0.7, 4: 0.6}, {2: 1.0, 4: 0.2}], 8),
        ("of equally good ones the fewest bits", [1, 1], [{2: 0.5, 4: 0.5}, {3: 0.2, 4: 0.2}], 100),
        ("layers may have different choices", [1, 2, 1], [{8: 0.0}, {2: 1.0, 3: 0.5}, {4: 0.1, 16: 0.0}], 20),
        ("no layer, no bits: an empty list", [], [], 5),
        ("None where nothing fits", [5, 5], [{2: 1.0, 4: 0.0}, {2: 1.0, 4: 0.0}], 19),
        ("None where one layer alone does not fit", [1, 50], [{2: 1.0}, {2: 1.0}], 60),
    ]
    rng = random.Random(5)
    for _ in range(60):
        n = rng.randint(1, 5)
        sizes = [rng.randint(1, 9) for _ in range(n)]
        errors = [
            {b: round(rng.random() / b, 3) for b in rng.sample((2, 3, 4, 5, 8), rng.randint(1, 4))} for _ in sizes
        ]
        most = sum(s * max(e) for s, e in zip(sizes, errors, strict=True))
        cases.append(("random layers", sizes, errors, rng.randint(1, most + 2)))
    sizes = [rng.choice((1, 1, 3)) for _ in range(36)]
    errors = [{b: round(rng.random() / b, 3) for b in (2, 3, 4, 8)} for _ in sizes]
    cases.append(("a model of 36 layers: not all ways can be tried", sizes, errors, int(3.3 * sum(sizes))))
    for prop, sizes, errors, budget in cases:
        best = _by_table(sizes, errors, budget)
        given = {"sizes": sizes, "errors": errors, "budget": budget}
        expected = None if best is None else f"a sum of errors of {best[0]:.6g} with {best[1]} bits"
        got = ask(prop, given, expected, list(sizes), [dict(e) for e in errors], budget)
        if best is None:
            expect(prop, given, got is None, "None", got)
            continue
        shape = "the answer is a list with the bits of each layer"
        got = got.tolist() if hasattr(got, "tolist") else got
        expect(shape, given, isinstance(got, (list, tuple)), expected, repr(got))
        expect(shape, given, len(got) == len(sizes), f"{len(sizes)} numbers", repr(got))
        allowed = all(bits in choices for bits, choices in zip(got, errors, strict=True))
        expect("only a layer's own choices are taken", given, allowed, "keys of its dict", repr(got))
        spent = sum(bits * size for bits, size in zip(got, sizes, strict=True))
        total = sum(choices[bits] for bits, choices in zip(got, errors, strict=True))
        expect("the budget is kept", given, spent <= budget, f"at most {budget} bits", f"{spent} bits: {got}")
        expect(prop, given, total <= best[0] + 1e-6, expected, f"{total:.6g}: {got}")
        fewest = "of equally good ones the fewest bits"
        expect(fewest, given, abs(total - best[0]) > 1e-7 or spent <= best[1], expected, f"{spent} bits: {got}")
