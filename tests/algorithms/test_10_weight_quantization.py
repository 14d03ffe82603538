"""Notebook 10: grids, GPTQ, AWQ, calibration and packing hold their properties; broken twins are caught; so are wrong answers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook_cells import answers, assert_names_what_broke, edited
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from helpers import choice_tasks, exercises, quant_kernels, quantize
from helpers.errors import EngineError
from helpers.paths import ROOT
from helpers.quantize import Calibration, QuantizationError, linear_layers

NAME = "10_weight_quantization"
CAUGHT = (AssertionError, LookupError, ValueError, TypeError, RuntimeError, QuantizationError)


@pytest.fixture(scope="module")
def nb(load_algorithms):
    return load_algorithms(NAME)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def helper_twin(*edits: tuple[str, str]) -> ModuleType:
    """`helpers.quantize` with a seeded bug; each edit must change the source exactly once."""
    source = (ROOT / "helpers" / "quantize.py").read_text(encoding="utf-8")
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in quantize.py"
        source = source.replace(old, new)
    module = ModuleType("quantize_of_10")
    exec(compile(source, "quantize_of_10", "exec"), module.__dict__)
    return module


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- the grid -----------------------------------------------------------------------------------------------------------
def check_grid(q, w, bits, size, symmetric):
    codes, scales, zeros = q.quantize(w, bits, size, symmetric)
    n_groups = 1 if size == -1 else w.shape[1] // size
    top = 2**bits - 1
    assert codes.shape == w.shape and scales.shape == zeros.shape == (w.shape[0], n_groups)
    assert codes.dtype == torch.uint8 and int(codes.max()) <= top
    assert (scales > 0).all() and (zeros == zeros.round()).all() and (zeros >= 0).all() and (zeros <= top).all()
    value = q.dequantize(codes, scales, zeros)
    steps = (value - w).abs() / scales.repeat_interleave(w.shape[1] // n_groups, dim=1)
    inside = (codes > 0) & (codes < top)
    assert steps[inside].max() <= 0.501 if inside.any() else True
    assert steps.max() <= (0.501 if symmetric else 1.001), (
        steps.max()
    )  # an integer zero moves one end by up to half a step
    groups = w.reshape(w.shape[0], n_groups, -1)
    if symmetric:
        extent = 2 * groups.abs().amax(-1)
        assert (zeros == 2 ** (bits - 1)).all()
    else:
        extent = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
    assert torch.allclose(torch.where(extent > 0, scales * top, extent), extent, rtol=1e-5)
    assert (value[w == 0] == 0).all(), "zero is a value of every grid"
    if not symmetric:
        assert torch.allclose(q.fake_quantize(value, bits, size, symmetric), value, atol=1e-5), "twice is once"


def check_groups_are_neighbours_in_a_row(q):
    """A change inside a group changes no code outside it: other rows, other groups."""
    w = normal(6, 96, seed=3)
    before = q.fake_quantize(w, 4, 32, False)
    louder = w.clone()
    louder[2, 32:64] *= 50
    changed = (q.fake_quantize(louder, 4, 32, False) != before).nonzero()
    assert {tuple(place) for place in changed.tolist()} <= {(2, j) for j in range(32, 64)}
    assert len(changed) > 16


def check_quantizer(q):
    for bits in (2, 3, 4, 8):
        for size in (32, 96, -1):
            for symmetric in (True, False):
                check_grid(q, normal(5, 192, seed=bits), bits, size, symmetric)
                check_grid(q, 3 + normal(5, 192, seed=bits).abs(), bits, size, symmetric)
    check_groups_are_neighbours_in_a_row(q)
    minimum = 3.7 + 0.25 * torch.arange(16.0).repeat(2, 2)
    stored = q.fake_quantize(minimum, 4, 16, False, integer_zero=False)
    assert torch.allclose(stored, minimum, atol=1e-5), "a grid with a stored minimum holds its own values"
    scales = q.quantize(normal(4, 64), 4, 32, True, scale_dtype=torch.bfloat16)[1]
    assert torch.equal(scales, scales.bfloat16().float())


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from((2, 3, 4, 8)),
    n_groups=st.integers(1, 4),
    size=st.sampled_from((1, 4, 25, 48)),
    n_out=st.integers(1, 5),
    symmetric=st.booleans(),
    shift=st.sampled_from((0.0, 5.0, -5.0)),
    seed=st.integers(0, 99),
)
def test_a_grid_is_what_it_says(bits, n_groups, size, n_out, symmetric, shift, seed):
    check_grid(quantize, shift + normal(n_out, n_groups * size, seed=seed), bits, size, symmetric)


def test_the_quantizer(nb):
    check_quantizer(quantize)
    row = normal(64, seed=5)
    by_hand = torch.tensor(nb.round_row(row.tolist(), 4))
    assert torch.allclose(by_hand, quantize.fake_quantize(row[None], 4, 64, False)[0], atol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_and_constants(symmetric):
    assert (quantize.fake_quantize(torch.zeros(3, 32), 4, 16, symmetric) == 0).all()
    for value in (0.3, -0.3):
        w = torch.full((3, 32), value)
        assert torch.allclose(quantize.fake_quantize(w, 4, 32, symmetric), w, atol=0.021 if symmetric else 1e-6)


def test_errors_name_the_layer_and_what_is_legal():
    w = normal(4, 576)
    with pytest.raises(
        QuantizationError, match=r"q_proj: groups of 128 do not divide its 576 inputs[\s\S]*64, 72, 96.*-1"
    ):
        quantize.quantize(w, 4, 128, True, name="q_proj")
    for size in (0, -2, 1000):
        with pytest.raises(QuantizationError, match="do not divide"):
            quantize.quantize(w, 4, size, True)
    for bits in (0, 1, 9, 16):
        with pytest.raises(QuantizationError, match=rf"up_proj: {bits} bits[\s\S]*2 to 8"):
            quantize.quantize(w, bits, 64, True, name="up_proj")
    for bad in (float("nan"), float("inf")):
        broken = w.clone()
        broken[1, 5] = bad
        for symmetric in (True, False):
            with pytest.raises(QuantizationError, match="k_proj holds NaN"):
                quantize.quantize(broken, 4, 64, symmetric, name="k_proj")
    with pytest.raises(QuantizationError, match="too small for"):
        quantize.quantize(1e-9 * w, 4, 64, True, scale_dtype=torch.float16)
    for width, legal in ((100, 25), (96, 32)):
        quantize.quantize(normal(2, width), 4, legal, True)


QUANTIZER_TWINS = {
    "a zero of the wrong sign": (("zeros = -low / scales", "zeros = low / scales"),),
    "a zero that is not whole": (
        ("zeros.round().clamp(0, top) if integer_zero", "zeros.clamp(0, top) if integer_zero"),
    ),
    "a zero outside the codes": (("low, high = low.clamp(max=0), high.clamp(min=0)", "pass"),),
    "one step too many": (("scales = (high - low) / top", "scales = (high - low) / (top + 1)"),),
    "groups across rows": (
        (
            "groups = w.reshape(n_out, -1, check_settings(n_in, bits, group_size, name))",
            "groups = w.T.reshape(n_out, -1, check_settings(n_in, bits, group_size, name))",
        ),
    ),
    "codes that are cut, not rounded": (("(groups / scales + zeros).round()", "(groups / scales + zeros).floor()"),),
    "a zero added twice": (
        ("((groups - zeros[..., None]) * scales[..., None])", "((groups - 2 * zeros[..., None]) * scales[..., None])"),
    ),
    "the scale of a symmetric grid by its maximum, not its magnitude": (
        ("high = torch.maximum(high, -low)", "high = high.abs()"),
    ),
    "scales rounded after the codes": (("scales = scales.to(scale_dtype).to(groups.dtype)", "pass"),),
}


@pytest.mark.parametrize("name", QUANTIZER_TWINS)
def test_a_broken_quantizer_is_caught(name):
    with pytest.raises(CAUGHT):
        check_quantizer(helper_twin(*QUANTIZER_TWINS[name]))


def test_stored_bits_counts_scales_and_zeros():
    assert quantize.stored_bits(4, 64, True) == 4.25
    assert quantize.stored_bits(4, 32, False) == 4 + 20 / 32


# -- calibration --------------------------------------------------------------------------------------------------------
def small_net():
    net = nn.ModuleDict({"q": nn.Linear(8, 8), "k": nn.Linear(8, 4), "o": nn.Linear(8, 3), "lm_head": nn.Linear(8, 5)})
    return net, linear_layers(net)


def check_calibration(q):
    net, layers = small_net()
    assert sorted(layers) == ["k", "o", "q"]
    inputs = [normal(2, 5, 8, seed=i) for i in range(3)]
    with q.Calibration(layers) as seen:
        for x in inputs:
            net.q(x), net.k(x), net.o(3 * x)
    rows = torch.cat(inputs).reshape(-1, 8)
    assert seen.readers == {"q": ["q", "k"], "o": ["o"]}
    for name, factor in (("q", 1), ("k", 1), ("o", 3)):
        assert torch.allclose(seen.hessians[name], 2 * factor**2 * rows.T @ rows / 30, atol=1e-4)
        assert torch.allclose(seen.absmax[name], factor * rows.abs().amax(0))
        assert torch.allclose(seen.absmean[name], factor * rows.abs().mean(0), atol=1e-5)
        assert seen.n_tokens[name] == 30
    w, other = net.o.weight, net.o.weight + 0.1 * normal(3, 8, seed=9)
    direct = (rows @ (w - other).T).norm() / (rows @ w.T).norm()
    assert abs(q.output_error(w, other, seen.hessians["o"]) - float(direct)) < 1e-5
    net.q(normal(4, 8))
    assert seen.n_tokens["q"] == 30, "hooks are gone afterwards"


def test_calibration():
    check_calibration(quantize)


def check_output_error_of_nothing(q):
    """A layer that says 0 on every input: no error if its replacement says 0 too, else an endless one; never NaN."""
    nothing, h = torch.zeros(3, 8), torch.eye(8)
    assert q.output_error(nothing, nothing, h) == 0.0 == q.output_error(normal(3, 8), normal(3, 8), torch.zeros(8, 8))
    assert q.output_error(nothing, torch.ones(3, 8), h) == float("inf")
    assert q.output_error(torch.ones(3, 8), nothing, h) == 1.0


def test_output_error_of_nothing():
    check_output_error_of_nothing(quantize)
    with pytest.raises(AssertionError):
        check_output_error_of_nothing(helper_twin(("if float(size) <= 0:", "if False:")))


CALIBRATION_TWINS = {
    "a Hessian of the wrong axis": (("addmm_(rows.T, rows, alpha=2.0)", "addmm_(rows.T, rows.roll(1, 0), alpha=2.0)"),),
    "a sum that is no mean": (("self.hessians[name] /= n", "pass"),),
    "the last batch only": (("self.absmean[name] += magnitude.sum(0)", "self.absmean[name] = magnitude.sum(0)"),),
    "hooks that stay": (("            handle.remove()", "            pass"),),
    "strangers share an input": (("self._last[0] is x", "self._last[0].shape == x.shape"),),
}


@pytest.mark.parametrize("name", CALIBRATION_TWINS)
def test_broken_calibration_is_caught(name):
    with pytest.raises(CAUGHT):
        check_calibration(helper_twin(*CALIBRATION_TWINS[name]))


def test_calibration_without_text_or_with_nan_names_the_layer():
    net, layers = small_net()
    with pytest.raises(QuantizationError, match="No calibration token reached the layer o"), Calibration(layers):
        x = normal(3, 8)
        net.q(x), net.k(x)
    for tokens in (torch.zeros(0, 8), torch.zeros(2, 0, 8)):
        with pytest.raises(QuantizationError, match="No calibration token reached the layer q"), Calibration(layers):
            net.q(tokens), net.k(tokens), net.o(tokens)
    bad = normal(3, 8)
    bad[1, 2] = float("nan")
    with pytest.raises(QuantizationError, match="An input of the layer o is NaN"), Calibration(layers):
        net.q(x := normal(3, 8)), net.k(x), net.o(bad)
    with pytest.raises(ZeroDivisionError), Calibration(layers):
        raise ZeroDivisionError  # the reader's own error is not hidden by ours


# -- GPTQ ---------------------------------------------------------------------------------------------------------------
def problem(n_out=12, n_in=48, seed=0, n=400, dtype=torch.float64):
    mix = normal(n_in, n_in, seed=seed, dtype=dtype)
    x = normal(n, n_in, seed=seed + 100, dtype=dtype) @ mix
    return normal(n_out, n_in, seed=seed + 200, dtype=dtype), 2 * x.T @ x / n


def check_gptq(nb):
    # Asymmetric: the largest weight of a symmetric group lies half way between two codes, where rounding errors decide.
    for seed, size, block, bits in ((0, 16, 32, 3), (1, 48, 128, 4), (2, 8, 8, 2), (3, 24, 32, 4)):
        symmetric = False
        w, h = problem(seed=seed)
        before = w.clone(), h.clone()
        codes, scales, zeros = nb.gptq(w, h, bits, size, symmetric, block_size=block)
        assert torch.equal(w, before[0]) and torch.equal(h, before[1]), "the given tensors stay as they are"
        at_once = nb.gptq(w, h, bits, size, symmetric, block_size=10**6)
        assert torch.allclose(scales, at_once[1]) and torch.equal(codes, at_once[0]), "blocks are only faster"
        assert int(codes.max()) <= 2**bits - 1 and codes.shape == w.shape

        def snap(column, j, s=scales, z=zeros, size=size, top=2**bits - 1):
            s, z = s[:, j // size], z[:, j // size]
            return s * ((column / s + z).round().clamp(0, top) - z)

        damped = h + 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
        plain = nb.gptq_plainly(w, damped, snap)
        assert torch.allclose(plain, quantize.dequantize(codes, scales, zeros), atol=1e-8)
        rtn = quantize.fake_quantize(w, bits, size, symmetric)
        error = [quantize.output_error(w, x, h) for x in (plain, rtn)]
        assert error[0] < 0.9 * error[1], error
    # The first group's grid comes from weights that nothing has moved yet; a later one's from moved ones.
    before = quantize.quantize(w, bits, size, symmetric)[1]
    assert torch.equal(scales[:, 0], before[:, 0]) and not torch.isclose(scales[:, 1], before[:, 1]).any()
    # Uncorrelated inputs leave nothing to make good: GPTQ is RTN.
    diagonal = torch.diag(torch.rand(48, dtype=torch.float64) + 0.5)
    for symmetric in (True, False):
        same = nb.gptq(w, diagonal, 3, 16, symmetric)
        assert torch.equal(same[0], quantize.quantize(w, 3, 16, symmetric)[0])


def check_act_order(nb):
    w, h = problem(seed=7)
    big = torch.ones(48, dtype=torch.float64)
    big[[5, 20, 47]] = 3.0
    h = h * big * big[:, None]
    codes, scales, zeros = nb.gptq(w, h, 3, 16, symmetric=False, order="act")
    assert torch.equal(scales, quantize.quantize(w, 3, 16, False)[1]), "grids are fixed before any column has moved"
    ordered = quantize.output_error(w, quantize.dequantize(codes, scales, zeros), h)
    assert ordered < quantize.output_error(w, quantize.fake_quantize(w, 3, 16, False), h)
    order = h.diagonal().argsort(descending=True)
    assert int(order[0]) in (5, 20, 47)

    def snap(column, j):
        s, z = scales[:, int(order[j]) // 16], zeros[:, int(order[j]) // 16]
        return s * ((column / s + z).round().clamp(0, 7) - z)

    damped = h + 0.01 * h.diagonal().mean() * torch.eye(48, dtype=h.dtype)
    plain = nb.gptq_plainly(w[:, order], damped[order][:, order], snap)
    mine = quantize.dequantize(codes, scales, zeros)
    assert torch.allclose(mine[:, order], plain, atol=1e-8), (
        "the plain one on columns sorted by the size of their inputs"
    )


def check_static_grids(nb):
    """All grids before any column has moved, columns from left to right: the plain one on the grids of RTN."""
    w, h = problem(seed=8)
    codes, scales, zeros = nb.gptq(w, h, 3, 16, symmetric=False, order="static")
    _, rtn_scales, rtn_zeros = quantize.quantize(w, 3, 16, False)
    assert torch.equal(scales, rtn_scales) and torch.equal(zeros, rtn_zeros)

    def snap(column, j):
        s, z = rtn_scales[:, j // 16], rtn_zeros[:, j // 16]
        return s * ((column / s + z).round().clamp(0, 7) - z)

    damped = h + 0.01 * h.diagonal().mean() * torch.eye(48, dtype=h.dtype)
    assert torch.allclose(nb.gptq_plainly(w, damped, snap), quantize.dequantize(codes, scales, zeros), atol=1e-8)
    with pytest.raises(QuantizationError, match=r"k_proj: there is no order 'stattic'[\s\S]*static, act"):
        nb.gptq(w, h, 3, 16, order="stattic", name="k_proj")


def check_damping(nb):
    w, _ = problem()
    x = normal(10, 48, seed=5, dtype=torch.float64)
    singular = 2 * x.T @ x / 10
    with pytest.raises(QuantizationError, match=r"o_proj: the Hessian .* damping of 0[\s\S]*Raise the damping"):
        nb.gptq(w, singular, 3, 16, damp=0.0, name="o_proj")
    assert torch.isfinite(quantize.dequantize(*nb.gptq(w, singular, 3, 16))).all()
    dead = singular.clone()
    dead[:, 7] = dead[7] = 0.0
    kept = quantize.dequantize(*nb.gptq(w, dead, 4, 16))
    assert torch.isfinite(kept).all()
    everything_dead = quantize.dequantize(*nb.gptq(w, torch.zeros(48, 48, dtype=torch.float64), 4, 16))
    assert torch.equal(everything_dead, quantize.fake_quantize(w, 4, 16, True))
    upper = nb.inverse_factor(problem()[1])
    assert torch.equal(upper, upper.triu()) and (upper.diagonal() > 0).all()
    h = problem()[1]
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(48, dtype=torch.float64)
    assert torch.allclose(upper.T @ upper @ damped, torch.eye(48, dtype=torch.float64), atol=1e-6)
    heavy = nb.gptq(w, h, 3, 16, symmetric=False, damp=1e9)
    assert torch.equal(heavy[0], quantize.quantize(w, 3, 16, False)[0]), "with endless damping GPTQ is RTN"


def check_refusals(nb):
    """What no damping mends is not said to want damping, and a damping below 0 is none."""
    w, h = problem()
    for bad in (float("nan"), float("inf")):
        broken = h.clone()
        broken[3, 4] = bad
        with pytest.raises(QuantizationError, match="v_proj: the Hessian of its inputs holds NaN") as caught:
            nb.gptq(w, broken, 3, 16, name="v_proj")
        assert "Raise" not in str(caught.value)
    with pytest.raises(QuantizationError, match=r"v_proj: a damping of -0\.1 was asked for[\s\S]*0 or more"):
        nb.gptq(w, h, 3, 16, damp=-0.1, name="v_proj")


@pytest.mark.parametrize("check", [check_gptq, check_act_order, check_static_grids, check_damping, check_refusals])
def test_gptq(nb, check):
    check(nb)


def test_gptq_takes_widths_of_96_and_100_and_refuses_groups_that_do_not_divide(nb):
    for n_in, size in ((96, 32), (100, 25), (100, -1)):
        w, h = problem(n_in=n_in)
        assert nb.gptq(w, h, 4, size)[0].shape == w.shape
    with pytest.raises(QuantizationError, match="down_proj: groups of 32 do not divide its 100 inputs"):
        nb.gptq(w, h, 4, 32, name="down_proj")
    w[0, 0] = float("nan")
    with pytest.raises(QuantizationError, match="down_proj holds NaN"):
        nb.gptq(w, h, 4, 25, name="down_proj")


GPTQ_TWINS = {
    "grids made in turn where they are to come first": (
        check_static_grids,
        ("if order is None and j % size", "if j % size"),
    ),
    "static grids in the order of inputs": (
        check_static_grids,
        ('if order == "act" else torch', "if order else torch"),
    ),
    "any word is an order": (check_static_grids, ('if order not in (None, "static", "act"):', "if False:")),
    "a Hessian of NaN that wants damping": (check_refusals, ("if not torch.isfinite(hessian).all():", "if False:")),
    "a damping below 0": (check_refusals, ("    if damp < 0:\n", "    if False:\n")),
    "a Hessian without damping": (check_damping, ("diagonal += damp * diagonal.mean()", "pass")),
    "dead inputs": (check_damping, ("diagonal[diagonal == 0] = 1.0", "pass")),
    "damping by the sum": (check_damping, ("damp * diagonal.mean()", "damp * diagonal.sum()")),
    "the factor of H, not of its inverse": (
        check_gptq,
        ("return torch.linalg.cholesky(inverse, upper=True)", "return torch.linalg.cholesky(damped, upper=True)"),
    ),
    "the lower factor": (
        check_gptq,
        ("return torch.linalg.cholesky(inverse, upper=True)", "return torch.linalg.cholesky(inverse)"),
    ),
    "errors made worse": (check_gptq, ("w[:, j:stop] -= errors", "w[:, j:stop] += errors")),
    "errors not divided": (check_gptq, ("* (code - z)) / upper[j, j]", "* (code - z))")),
    "errors forgotten at a block's end": (
        check_gptq,
        ("        w[:, stop:] -= errors @ upper[start:stop, stop:]\n", ""),
    ),
    "grids from weights that nothing moved": (check_gptq, ("if order is None and j % size == 0", "if False")),
    "groups that cross a block's border": (
        check_gptq,
        ("block_size = n_in if size > block_size else block_size // size * size", "pass"),
    ),
    "codes in the order of rounding": (check_act_order, ("codes[:, column] =", "codes[:, j] =")),
    "grids in the order of rounding": (
        check_act_order,
        (
            "s, z = scales[:, column // size], zeros[:, column // size]",
            "s, z = scales[:, j // size], zeros[:, j // size]",
        ),
    ),
    "small inputs first": (
        check_act_order,
        ('argsort(descending=True) if order == "act"', 'argsort() if order == "act"'),
    ),
    "the Hessian left in order": (check_act_order, ("hessian[places][:, places]", "hessian")),
    "the plain one forgets what is rounded": (
        check_gptq,
        ("inverse = torch.linalg.inv(hessian[j:, j:])", "inverse = torch.linalg.inv(hessian)[j:, j:]"),
    ),
}


@pytest.mark.parametrize("name", GPTQ_TWINS)
def test_broken_gptq_is_caught(load_algorithms, name):
    check, edit = GPTQ_TWINS[name]
    twin = load_algorithms(NAME, edit)
    with pytest.raises((*CAUGHT, pytest.fail.Exception)):
        check(twin)


# -- AWQ ----------------------------------------------------------------------------------------------------------------
def salient(seed=0):
    """A weight, and inputs of which three are twenty times as large."""
    x = normal(300, 64, seed=seed)
    x[:, [3, 20, 41]] *= 20
    return normal(32, 64, seed=seed + 50), 2 * x.T @ x / 300, x


def check_scales(nb):
    w, h, x = salient()
    snap = partial(quantize.fake_quantize, bits=3, group_size=32, symmetric=False)
    scales, alpha = nb.search_scales([w], h, x.abs().mean(0), snap)
    plain, scaled = (quantize.output_error(w, v, h) for v in (snap(w), snap(w * scales) / scales))
    assert scaled < 0.7 * plain and 0 < alpha < 1, (scaled, plain, alpha)
    assert scales[[3, 20, 41]].min() > 2 * scales[[0, 1, 2]].max(), "large inputs get large scales"
    assert abs(float(scales.max() * scales.min()) - 1) < 1e-3
    tried = []
    for step in range(20):
        s = x.abs().mean(0).pow(step / 20)
        s = s / (s.max() * s.min()).sqrt()
        tried.append(quantize.output_error(w, snap(w * s) / s, h))
    assert abs(scaled - min(tried)) < 1e-5 and abs(plain - tried[0]) < 1e-5
    flat, nothing = nb.search_scales([w], torch.eye(64), torch.ones(64), snap)
    assert torch.allclose(flat, torch.ones(64)) and nothing == 0


def check_ladder(nb):
    w, h, x = salient(seed=4)
    rounded = quantize.fake_quantize(w, 3, 32, True)
    kept = nb.keep_columns(w, rounded, nb.most_of(x.abs().mean(0), 0.05))
    assert torch.equal((kept == w).all(0).nonzero()[:, 0], torch.tensor([3, 20, 41]))
    assert quantize.output_error(w, kept, h) < 0.5 * quantize.output_error(w, rounded, h)
    assert len(nb.most_of(torch.rand(576))) == 6 and len(nb.most_of(torch.rand(20))) == 1


def check_clip(nb):
    w, h, _ = salient(seed=6)
    w[:, 7] *= 8  # an outlier that stretches its group's grid
    clipped = nb.clip_groups(w, h, 3, 32)
    assert clipped.shape == w.shape and (clipped.abs() <= w.abs() + 1e-6).all() and (clipped != w).any()
    for g in range(2):
        part = slice(32 * g, 32 * g + 32)
        block = h[part, part]
        for row in range(0, 32, 7):
            one = w[row : row + 1, part]
            before = quantize.output_error(one, quantize.fake_quantize(one, 3, 32, False), block)
            after = quantize.output_error(
                one, quantize.fake_quantize(clipped[row : row + 1, part], 3, 32, False), block
            )
            assert after <= before + 1e-6, (g, row, after, before)


def tiny_model(n_kv_heads=2, seed=1, hidden=64):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=n_kv_heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.model.embed_tokens.weight.data.copy_(model.model.embed_tokens.weight.bfloat16())
    for block in model.model.layers:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.weight.data.uniform_(0.5, 1.5)
            norm.weight.data[[3, 11, 20]] *= 12  # a few inputs are large, as in real models
    return model


IDS = torch.randint(0, 128, (8, 64), generator=torch.Generator().manual_seed(3))
UNSEEN = torch.randint(0, 128, (4, 64), generator=torch.Generator().manual_seed(4))


def check_fold(nb):
    """Any scales, folded at every place of a block where they can be, leave the model's output as it was."""
    for n_kv_heads in (2, 4):
        model, count = tiny_model(n_kv_heads), 0
        before = model(UNSEEN).logits
        for block in model.model.layers:
            groups = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]]
            for names in [*groups, ["mlp.down_proj"], ["self_attn.o_proj"]]:
                source = nb.source_of(block, names[0])
                if source is None:
                    continue
                readers = [block.get_submodule(name) for name in names]
                scales = 0.2 + 3 * torch.rand(readers[0].in_features, generator=torch.Generator().manual_seed(count))
                weights = [layer.weight.clone() for layer in readers]
                nb.fold_scales(source, readers, scales)
                for layer, w in zip(readers, weights, strict=True):
                    assert torch.allclose(layer.weight, w * scales, rtol=1e-5), "columns are inputs"
                count += 1
        assert count == (9 if n_kv_heads == 2 else 12), "o has scales only without shared value heads"
        assert torch.allclose(model(UNSEEN).logits, before, atol=1e-4)


def check_whole_models(nb):
    """Both methods lose less than rounding on the same grid, on ids that were not calibrated on (two models together)."""
    seeds = (1, 2)
    references = {seed: tiny_model(seed=seed)(UNSEEN).logits for seed in seeds}

    def loss(model, seed):
        return float((model(UNSEEN).logits - references[seed]).norm() / references[seed].norm())

    def rounded(symmetric, seed):
        model = tiny_model(seed=seed)
        for layer in linear_layers(model).values():
            layer.weight.data.copy_(quantize.fake_quantize(layer.weight, 4, 32, symmetric))
        return loss(model, seed)

    for make, symmetric in ((nb.gptq_block, True), (nb.awq_block, False)):
        losses = []
        for seed in seeds:
            model = tiny_model(seed=seed)
            packed = nb.quantize_blocks(model, IDS, partial(make, bits=4, group_size=32, scale_dtype=torch.bfloat16))
            assert sorted(packed) == sorted(linear_layers(model)), "every linear layer, once"
            for name, parts in packed.items():
                assert torch.equal(model.get_submodule(name).weight, quantize.dequantize(*parts))
                assert torch.equal(parts[1], parts[1].bfloat16().float())
            assert not any(block._forward_pre_hooks for block in model.model.layers)
            losses.append(loss(model, seed))
        plain = [rounded(symmetric, seed) for seed in seeds]
        assert sum(losses) < 0.75 * sum(plain), (make.__name__, losses, plain)


def check_blocks_see_quantized_blocks(nb):
    """Each block is calibrated on what it will see: the outputs of quantized blocks before it."""
    model, hessians = tiny_model(), []

    def coarse(block, layers, seen):
        hessians.append(seen.hessians[next(iter(layers))].clone())
        return {name: quantize.quantize(layer.weight, 2, 32, True) for name, layer in layers.items()}

    packed = nb.quantize_blocks(model, IDS, coarse)
    assert all(torch.equal(model.get_submodule(n).weight, quantize.dequantize(*parts)) for n, parts in packed.items())
    with Calibration(linear_layers(model)) as seen:
        model.model(IDS, use_cache=False)
    for index, hessian in enumerate(hessians):
        assert torch.allclose(hessian, seen.hessians[f"model.layers.{index}.self_attn.q_proj"], atol=1e-3), index


def check_search_names_what_it_cannot_do(nb):
    w, h, x = salient()
    snap = partial(quantize.fake_quantize, bits=3, group_size=32, symmetric=False)
    with pytest.raises(QuantizationError, match="up_proj: the error at the output is NaN"):
        nb.search_scales([w], h * float("nan"), x.abs().mean(0), snap, name="up_proj")
    with pytest.raises(QuantizationError, match="up_proj: groups of 48 do not divide"):
        nb.clip_groups(w, h, 3, 48, name="up_proj")
    w[0, 0] = float("nan")
    with pytest.raises(QuantizationError, match="up_proj holds NaN"):
        nb.clip_groups(w, h, 3, 32, name="up_proj")


AWQ_CHECKS = [
    check_scales,
    check_ladder,
    check_clip,
    check_fold,
    check_whole_models,
    check_blocks_see_quantized_blocks,
    check_search_names_what_it_cannot_do,
]


@pytest.mark.parametrize("check", AWQ_CHECKS)
def test_awq_and_whole_models(nb, check):
    check(nb)


AWQ_TWINS = {
    "no scales without a word": (
        check_search_names_what_it_cannot_do,
        ("    if best[1] is None:\n", "    if False:\n"),
    ),
    "clipping that names no layer": (
        check_search_names_what_it_cannot_do,
        ("check_settings(w.shape[1], bits, group_size, name)", "check_settings(w.shape[1], bits, group_size)"),
    ),
    "scales not undone in the search": (
        check_scales,
        ("wrong = w - snap(w * scales) / scales", "wrong = w - snap(w * scales)"),
    ),
    "the error of the weights, not of the output": (
        check_scales,
        ("((wrong @ hessian) * wrong).sum()", "(wrong * wrong).sum()"),
    ),
    "the worst scales": (check_scales, ("if error < best[0]:", "if not best[2] or error > best[0]:")),
    "alpha on the wrong side": (check_scales, ("magnitude.pow(step / n_grid)", "magnitude.pow(-step / n_grid)")),
    "scales without a middle": (check_scales, ("        scales = scales / (scales.max() * scales.min()).sqrt()\n", "")),
    "the smallest inputs are kept": (check_ladder, ("values.argsort(descending=True)", "values.argsort()")),
    "rows are kept": (check_ladder, ("kept[:, columns] = w[:, columns]", "kept[columns] = w[columns]")),
    "a limit that grows": (check_clip, ("largest * (1 - step / n_grid)", "largest * (1 + step / n_grid)")),
    "clipping by the wrong sign": (
        check_clip,
        ("best = torch.where(error < least", "best = torch.where(error > least"),
    ),
    "AWQ's scales not undone in the source": (
        check_fold,
        ("parameter.data.div_(scales.to(parameter.dtype).reshape(shape))", "pass"),
    ),
    "AWQ's scales undone twice": (
        check_fold,
        (
            "parameter.data.div_(scales.to(parameter.dtype).reshape(shape))",
            "parameter.data.div_(scales.to(parameter.dtype).reshape(shape) ** 2)",
        ),
    ),
    "scales on rows": (
        check_fold,
        (
            "layer.weight.data.mul_(scales.to(layer.weight.dtype))",
            "layer.weight.data.mul_(scales.to(layer.weight.dtype)[: layer.out_features].mean())",
        ),
    ),
    "folded into the wrong norm": (
        check_fold,
        ('"gate_proj": block.post_attention_layernorm', '"gate_proj": block.input_layernorm'),
    ),
    "folded into gate, behind silu": (check_fold, ('"down_proj": mlp.up_proj', '"down_proj": mlp.gate_proj')),
    "o folded under shared heads": (
        check_fold,
        ("if attention.v_proj.out_features == attention.o_proj.in_features else None", "or None"),
    ),
    "blocks that see unquantized ones": (
        check_blocks_see_quantized_blocks,
        ("            layers[name].weight.data.copy_(dequantize(*parts))\n", ""),
    ),
    "codes of another layer": (
        check_whole_models,
        (
            "zip(names, *(part.split(heights) for part in parts), strict=True)",
            "zip(names[::-1], *(part.split(heights) for part in parts), strict=True)",
        ),
    ),
    "a Hessian that knows nothing of the scales": (
        check_whole_models,
        (
            "seen.hessians[first] / scales / scales[:, None]",
            "seen.hessians[first] * 0 + seen.hessians[first].flip(0, 1)",
        ),
    ),
    "hooks that stay": (
        check_whole_models,
        ("    finally:\n        for handle in handles:\n            handle.remove()\n", "    finally:\n        pass\n"),
    ),
}


@pytest.mark.parametrize("name", AWQ_TWINS)
def test_broken_awq_is_caught(load_algorithms, name):
    check, edit = AWQ_TWINS[name]
    twin = load_algorithms(NAME, edit)
    with pytest.raises((*CAUGHT, pytest.fail.Exception)):
        check(twin)


def test_an_empty_calibration_set_is_refused(nb):
    with pytest.raises(QuantizationError, match="calibration set is empty"):
        nb.quantize_blocks(tiny_model(), IDS[:0], partial(nb.gptq_block, bits=4, group_size=32))


def test_errors_in_a_model_name_the_layer(nb):
    with pytest.raises(
        QuantizationError, match=r"model\.layers\.0\.self_attn\.q_proj.*groups of 48 do not divide its 64"
    ):
        nb.quantize_blocks(tiny_model(), IDS, partial(nb.gptq_block, bits=4, group_size=48))
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.mlp"):
        nb.quantize_blocks(model, IDS, partial(nb.awq_block, bits=4, group_size=32))
    assert not any(block._forward_pre_hooks for block in model.model.layers), "hooks are gone after an error too"


# -- checkpoints --------------------------------------------------------------------------------------------------------
LAYOUTS = (("gptq", True), ("awq", False), ("pack-quantized", True), ("pack-quantized", False))


def check_packing(nb):
    codes = torch.randint(0, 16, (6, 64), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    for order in (range(8), nb.AWQ_ORDER):
        words = nb.pack(codes, order)
        assert words.dtype == torch.int32 and words.shape == (6, 8)
        assert torch.equal(nb.unpack(words, order), codes)
    first = int(nb.pack(codes)[0, 0]) & 0xFFFFFFFF
    assert [first >> 4 * i & 15 for i in range(8)] == codes[0, :8].tolist(), "the lowest bits hold the first code"
    awq = int(nb.pack(codes, nb.AWQ_ORDER)[0, 0]) & 0xFFFFFFFF
    assert [awq >> 4 * i & 15 for i in (0, 4, 1, 5, 2, 6, 3, 7)] == codes[0, :8].tolist(), "AWQ's order"
    for layout, symmetric in LAYOUTS:
        parts = quantize.quantize(normal(32, 64, seed=2), 4, 32, symmetric, scale_dtype=torch.bfloat16)
        tensors = nb.to_layout(layout, *parts)
        for mine, theirs in zip(nb.from_layout(tensors), parts, strict=True):
            assert torch.equal(mine.float(), theirs.float()), (layout, symmetric)
        shapes = {key: tuple(value.shape) for key, value in tensors.items()}
        if layout == "gptq":
            assert shapes == {"qweight": (8, 32), "qzeros": (2, 4), "scales": (2, 32), "g_idx": (64,)}
            assert (tensors["qzeros"] == 0x77777777).all() and tensors["g_idx"].tolist() == [0] * 32 + [1] * 32
        elif layout == "awq":
            assert shapes == {"qweight": (64, 4), "qzeros": (2, 4), "scales": (2, 32)}
        else:
            assert shapes["weight_packed"] == (32, 8) and shapes["weight_scale"] == (32, 2)
            assert shapes.get("weight_zero_point") == (None if symmetric else (4, 2))


def test_packing(nb):
    check_packing(nb)


def test_the_layout_is_the_one_that_compressed_tensors_reads(nb):
    helpers_of = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes, scales, zeros = quantize.quantize(normal(32, 64, seed=8), 4, 32, False)
    tensors = nb.to_layout("pack-quantized", codes, scales, zeros)
    theirs = helpers_of.unpack_from_int32(tensors["weight_packed"].contiguous(), 4, torch.Size((32, 64)))
    assert torch.equal(theirs.to(torch.int16) + 8, codes.to(torch.int16))
    packed_zeros = tensors["weight_zero_point"].contiguous()
    theirs = helpers_of.unpack_from_int32(packed_zeros, 4, torch.Size((32, 2)), packed_dim=0)
    assert torch.equal(theirs.float() + 8, zeros)


def check_packing_refuses(nb):
    """What four bits cannot hold, a width that words cannot, a zero that `gptq` cannot, a layout that is none."""
    parts = quantize.quantize(normal(32, 64, seed=2), 4, 32, False)
    wide = quantize.quantize(normal(32, 64, seed=2), 8, 32, True)
    odd = quantize.quantize(normal(12, 64, seed=2), 4, 32, False)
    minimum = quantize.quantize(normal(32, 64, seed=2), 4, 32, False, integer_zero=False)
    positive = quantize.quantize(normal(32, 64, seed=2).abs(), 4, 32, False)
    for layout in nb.LAYOUT_NAMES:
        with pytest.raises(QuantizationError, match=r"up_proj: a row of .* to (127|2\d\d) [\s\S]*0 to 15"):
            nb.to_layout(layout, *wide, name="up_proj")
        with pytest.raises(QuantizationError, match=r"up_proj: a row of 12 [\s\S]*multiples of 8"):
            nb.to_layout(layout, odd[0], odd[1], odd[2].clamp(min=1), name="up_proj")
    with pytest.raises(QuantizationError, match=r"up_proj: a row of 32 [\s\S]*whole zeros"):
        nb.to_layout("awq", *minimum, name="up_proj")
    with pytest.raises(QuantizationError, match=r"up_proj: `gptq` holds zeros minus one[\s\S]*symmetric"):
        nb.to_layout("gptq", *positive, name="up_proj")
    assert torch.equal(nb.from_layout(nb.to_layout("awq", *positive))[2], positive[2])
    with pytest.raises(QuantizationError, match=r"no layout 'gtpq'[\s\S]*gptq, awq, pack-quantized"):
        nb.to_layout("gtpq", *parts)


def test_packing_refuses_what_does_not_fit(nb):
    check_packing_refuses(nb)


REFUSAL_TWINS = {
    "codes of 8 bits": (" or high > 15 or", " or"),
    "zeros below 0": ("if (zeros < 1).any():", "if False:"),
    "zeros that are not whole": ("(codes.is_floating_point() and (codes != codes.round()).any())", "False"),
    "rows of 12": ("if n % 8 or", "if"),
    "any name is a layout": ("if layout not in LAYOUT_NAMES:", "if False:"),
}


@pytest.mark.parametrize("name", REFUSAL_TWINS)
def test_packing_without_a_refusal_is_caught(load_algorithms, name):
    with pytest.raises((*CAUGHT, pytest.fail.Exception)):
        check_packing_refuses(load_algorithms(NAME, REFUSAL_TWINS[name]))


PACKING_TWINS = {
    "high bits first": ("<< (4 * place)", "<< (28 - 4 * place)"),
    "AWQ's order backwards": ("AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)", "AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)"),
    "zeros as they are": ("qzeros = words((zeros - 1).T)", "qzeros = words(zeros.T)"),
    "words that overflow": ("torch.where(words >= 2**31, words - 2**32, words)", "words.clamp(max=2**31 - 1)"),
    "the wrong axis": ('"qweight": words(codes).T', '"qweight": words(codes.T).T'),
    "zeros of no asymmetric grid": ("{} if (zeros == 8).all() else", "{} if True else"),
}


@pytest.mark.parametrize("name", PACKING_TWINS)
def test_broken_packing_is_caught(load_algorithms, name):
    with pytest.raises(CAUGHT):
        check_packing(load_algorithms(NAME, PACKING_TWINS[name]))


@pytest.mark.parametrize(("layout", "symmetric"), LAYOUTS)
def test_a_checkpoint_says_what_the_model_said(nb, tmp_path, layout, symmetric):
    model = tiny_model()
    make = nb.gptq_block if symmetric else nb.awq_block
    packed = nb.quantize_blocks(model, IDS, partial(make, bits=4, group_size=32, scale_dtype=torch.bfloat16))
    n_bytes = nb.write_checkpoint(tmp_path, model, packed, layout, 32, symmetric)
    back = nb.read_checkpoint(tmp_path, tiny_model(seed=9))
    for name in packed:
        assert torch.equal(back.get_submodule(name).weight, model.get_submodule(name).weight), name
    # What is not quantized is rounded to bf16: norms into which scales were folded.
    assert torch.allclose(
        back(UNSEEN).logits, model(UNSEEN).logits, atol=0.02 * float(model(UNSEEN).logits.abs().max())
    )
    assert n_bytes < 0.75 * 2 * model.num_parameters()
    if layout == "pack-quantized":
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        assert torch.allclose(loaded(UNSEEN).logits, back(UNSEEN).logits, atol=1e-4)


def test_a_checkpoint_that_is_none_or_of_another_model_is_refused(nb, tmp_path):
    with pytest.raises(QuantizationError, match="no 4-bit layers"):
        nb.read_checkpoint(tmp_path, tiny_model())
    model = tiny_model()
    packed = nb.quantize_blocks(model, IDS, partial(nb.gptq_block, bits=4, group_size=32))
    nb.write_checkpoint(tmp_path, model, packed, "gptq", 32, True)
    with pytest.raises(QuantizationError, match=r"the checkpoint holds \(64, "):
        nb.read_checkpoint(tmp_path, tiny_model(hidden=32))
    parts = quantize.quantize(normal(32, 64), 4, 32, True)
    mixed = nb.to_layout("gptq", *parts) | {"g_idx": torch.arange(64) % 2}
    with pytest.raises(QuantizationError, match=r"k_proj: .*act-order[\s\S]*static groups, whose grids"):
        nb.from_layout(mixed, "k_proj")


def check_reading_a_part(nb, folder):
    """A checkpoint must hold all of the model and nothing else, except biases of zeros; else the model stays as it was."""
    model = tiny_model()
    make = partial(nb.gptq_block, bits=4, group_size=32, scale_dtype=torch.bfloat16)
    nb.write_checkpoint(folder, model, nb.quantize_blocks(model, IDS, make), "gptq", 32, True)
    whole = load_file(folder / "model.safetensors")
    q_proj = "model.layers.1.self_attn.q_proj"

    def read(tensors):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        other = tiny_model(seed=9)
        before = other.model.layers[0].mlp.up_proj.weight.clone()
        try:
            return nb.read_checkpoint(folder, other)
        except QuantizationError:
            assert torch.equal(other.model.layers[0].mlp.up_proj.weight, before), "nothing is read by halves"
            raise

    without_layer = {k: v for k, v in whole.items() if not k.startswith("model.layers.1.")}
    with pytest.raises(QuantizationError, match=r"lacks: model\.layers\.1\.input_layernorm\.weight, .*\(9 in all\)"):
        read(without_layer)
    with pytest.raises(QuantizationError, match=r"lacks: model\.norm\.weight \(1 in all\)"):
        read({k: v for k, v in whole.items() if k != "model.norm.weight"})
    with pytest.raises(QuantizationError, match=rf"beside the model: {q_proj}\.bias \(1"):
        read(whole | {f"{q_proj}.bias": torch.ones(64)})
    back = read(whole | {f"{q_proj}.bias": torch.zeros(64)})
    assert torch.equal(back.get_submodule(q_proj).weight, model.get_submodule(q_proj).weight)


def test_a_part_of_a_checkpoint_is_refused(nb, tmp_path):
    check_reading_a_part(nb, tmp_path)


READING_TWINS = {
    "what is missing": ('("lacks", own - held - tied)', '("lacks", set())'),
    "what is too much": ('("has beside the model", held - own)', '("has beside the model", set())'),
    "biases of zeros": ('or part != "bias" or value.any()', "or True"),
    "every bias": (" or value.any():  # some", ":  # some"),
    "the tied head": ('{"lm_head.weight"} if model.config.tie_word_embeddings else set()\n    for', "set()\n    for"),
}


@pytest.mark.parametrize("name", READING_TWINS)
def test_careless_reading_is_caught(load_algorithms, tmp_path, name):
    with pytest.raises((*CAUGHT, pytest.fail.Exception)):
        check_reading_a_part(load_algorithms(NAME, READING_TWINS[name]), tmp_path)


# -- tasks --------------------------------------------------------------------------------------------------------------
def test_choice_tasks_are_scored_by_the_first_differing_token():
    task = partial(choice_tasks.ChoiceTask, prompt_ids=(5, 6))
    tasks = [task(kind=kind, choice_ids=(1, 2, 3, 4)) for kind in choice_tasks.KINDS for _ in range(3)]

    def says(token):
        def last_logits(ids, lengths):
            assert ids.shape == (3, 2) and lengths.tolist() == [2, 2, 2]
            return torch.eye(8)[token].repeat(len(ids), 1)

        return last_logits

    right = choice_tasks.task_accuracies(says(1), tasks, "fake")
    wrong = choice_tasks.task_accuracies(says(3), tasks, "fake")
    other = choice_tasks.task_accuracies(says(7), tasks, "fake")
    assert {r.value for r in right.values()} == {1.0} and {r.value for r in wrong.values()} == {0.0}
    assert list(right) == list(choice_tasks.KINDS) and right["maths"].n == 3 and other["code"].n == 3


def test_choice_tasks_of_the_bundled_model(bundled_model):
    from helpers.models import load_tokenizer

    tokenizer = load_tokenizer(str(bundled_model))
    tasks = choice_tasks.choice_tasks(tokenizer)
    assert tasks == choice_tasks.choice_tasks(tokenizer)
    counts = {kind: sum(task.kind == kind for task in tasks) for kind in choice_tasks.KINDS}
    assert counts == {"facts": 16, "maths": 16, "code": 12, "long context": 6}
    assert all(len(set(task.choice_ids)) == 4 for task in tasks)
    long = [task for task in tasks if task.kind == "long context"]
    assert all(len(task.prompt_ids) > 150 for task in long)


# -- kernels and other tools --------------------------------------------------------------------------------------------
def test_without_vllm_no_kernel_is_asked(monkeypatch):
    missing = SimpleNamespace(available=False, reason="this is a test")
    monkeypatch.setattr(
        quant_kernels, "describe", lambda: SimpleNamespace(capabilities={"vllm": missing}, device="cpu")
    )
    with pytest.raises(EngineError, match="cannot be asked: this is a test"):
        quant_kernels.probe()


class FakeKernel:
    """A kernel that can implement everything but 3 bits, from compute capability 8.0 on."""

    @classmethod
    def get_min_capability(cls):
        return 80

    @classmethod
    def can_implement(cls, config):
        if config == "broken":
            raise ImportError("no library")
        return (False, "no 3 bits") if config == 3 else (True, None)


def test_a_kernel_runs_here_where_vllm_could_choose_it():
    ask = partial(quant_kernels.ask, FakeKernel)
    assert ask(4, is_own=True, capability=80) == (True, "", 80)
    assert ask(4, is_own=True, capability=90) == (True, "", 80)
    assert ask(4, is_own=True, capability=None) == (True, "", 80), "a CPU has none, and vLLM compares nothing"
    assert ask(4, is_own=True, capability=75) == (False, "asks for compute capability 8.0, here is 7.5", 80)
    assert ask(4, is_own=False, capability=90) == (False, "for another platform", 80)
    assert ask(3, is_own=True, capability=90) == (False, "no 3 bits", 80)
    assert ask("broken", is_own=True, capability=90) == (False, "ImportError: no library", -1)


@pytest.mark.engine
def test_vllm_says_which_kernels_run_here():
    report = quant_kernels.probe(shapes=((64, 64),), rows=(1,), group_size=32)
    four = [v for v in report.verdicts if v.weights == "4 bits, symmetric" and v.group_size == 32]
    assert any(v.runs_here for v in four), [(v.kernel, v.reason) for v in four]
    three = [v for v in report.verdicts if v.weights == "3 bits, symmetric" and v.platform == "cpu"]
    assert three and not any(v.runs_here for v in three) and all(v.reason for v in three)
    assert all(v.platform == report.platform for v in report.verdicts if v.runs_here)
    assert all(bool(v.reason) != v.runs_here for v in report.verdicts)
    assert report.capability is None or report.platform in ("cuda", "rocm")
    assert report.times or report.no_time


def toolbox_script(name: str) -> SimpleNamespace:
    scope: dict = {"__name__": name, "__file__": str(ROOT / "helpers" / "toolboxes" / f"{name}.py")}
    exec((ROOT / "helpers" / "toolboxes" / f"{name}.py").read_text(encoding="utf-8"), scope)
    return SimpleNamespace(**scope)


def test_a_model_folder_in_the_form_that_archived_tools_read(tmp_path):
    new = {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}, "hidden_size": 8}
    source = tmp_path / "new"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(new))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    (source / "model.safetensors").write_bytes(b"weights")
    old = Path(toolbox_script("legacy_model").old_form(str(source), tmp_path / "old"))
    config = json.loads((old / "config.json").read_text())
    assert config == {"torch_dtype": "bfloat16", "rope_theta": 5e4, "hidden_size": 8}
    assert json.loads((old / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (old / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((source / "config.json").read_text()) == new, "the folder that was given stays as it is"


def test_an_unknown_recipe_is_refused_before_anything_is_loaded():
    with pytest.raises(SystemExit, match=r"no recipe 'gtpq'.*gptq, awq"):
        toolbox_script("llmcompressor_quantize").main({"recipe": "gtpq"})


# -- exercises ----------------------------------------------------------------------------------------------------------
def test_the_buggy_one_fails_where_the_text_says_it_does():
    result = exercises.check("10.2", answers(NAME, "exercise")["buggy_quantize"])
    assert result.state == "fail" and "rows of positive values" in result.message, result


WRONG_EDITS = [
    ("10.1", "total = 2 * other_elements", "total = other_elements", "other elements have two bytes"),
    ("10.1", "+ 2 * groups", "+ groups", "a scale two bytes"),
    ("10.1", "0 if symmetric else", "0 if not symmetric else", "a scale two bytes"),
    ("10.1", "-(-n_out * n_in * bits // 8)", "n_out * n_in * bits // 8", "whole byte"),
    ("10.1", "-(-groups * bits // 8)", "groups * bits // 8", "zeros of a layer end"),
    ("10.1", "1 if group_size == -1", "n_in if group_size == -1", "-1 is one group"),
    ("10.1", "* bits // 8) + 2", "* (4 if bits == 3 else bits) // 8) + 2", "three bits"),
    ("10.1", "return total", "return total + 1", "a scale two bytes"),
    ("10.1", "-(-n_out * n_in * bits // 8)", "n_out * -(-n_in * bits // 8)", "codes run on from row to row"),
    ("10.1", "-(-groups * bits // 8)", "n_out * -(-groups // n_out * bits // 8)", "zeros run on"),
    ("10.2", ".clamp(max=0), w", ", w", "positive"),
    ("10.2", "w.amax(1, keepdim=True).clamp(min=0)", "w.amax(1, keepdim=True)", "negative"),
    ("10.2", "    scales[scales == 0] = 1.0\n", "", "every value is a number"),
    ("10.2", "/ top", "/ (top + 1)", "a grid reaches"),
    ("10.2", "(high - low) / top", "(high - low) / top * 1.001", "a grid reaches"),
    ("10.2", "(w / scales).round()", "(w / scales).floor()", "nearest"),
    ("10.2", "zeros = (-low / scales).round()", "zeros = (-low / scales)", "whole numbers"),
    ("10.2", "zeros = (-low / scales).round()", "zeros = (low / scales).round()", "step"),
    ("10.2", "return codes, scales, zeros", "return codes, zeros, scales", "whole numbers"),
    ("10.2", "return codes, scales, zeros", "return codes, scales", "(codes, scales, zeros)"),
    ("10.2", "return codes, scales, zeros", "return codes, scales[:, 0], zeros[:, 0]", "[n, 1]"),
    ("10.2", "    top = 2**bits - 1\n", "    top = 15\n", "from 0 to"),
    ("10.2", "    top = 2**bits - 1\n", "    top = 2**bits - 1\n    w -= w.mean()\n", "stay as they are"),
    ("10.3", "    w = w.clone()\n", "", "stay as they are"),
    ("10.3", "(w[:, j] / scale).round()", "(w[:, j] / scale).round().clamp(-8, 7)", "rounded to a multiple"),
    ("10.3", "/ inverse[0, 0]", "", "column"),
    ("10.3", "w[:, j:] -= error", "w[:, j:] += error", "columns after j"),
    ("10.3", "    w[:, j:] -= error[:, None] * inverse[0]\n", "", "columns after j"),
    ("10.3", ".round() * scale", ".floor() * scale", "rounded to a multiple"),
    ("10.3", "    w[:, j] = rounded\n", "    w[:, j] = rounded\n    w = (w / scale).round() * scale\n", "columns"),
    ("10.3", "\n    return w", "\n    return w[:, j:]", "a new w"),
    ("10.4", "norm / s_in", "norm * s_in", "output does not change"),
    ("10.4", "norm / s_in", "norm", "output does not change"),
    ("10.4", "gate * s_in", "gate / s_mid[:, None] * s_in", "output does not change"),
    ("10.4", " / s_mid[:, None]", "", "output does not change"),
    ("10.4", "return norm", "norm /= 1\n    gate *= s_in\n    return norm", "stay as they are"),
    (
        "10.4",
        "return norm / s_in, gate * s_in, up * s_in / s_mid[:, None], down * s_mid",
        "return norm, gate, up, down",
        "gate are multiplied",
    ),
    ("10.4", "down * s_mid", "down * s_mid, None", "(norm, gate, up, down)"),
    ("10.5", "spent <= budget and", "", "budget is kept"),
    ("10.5", "spent <= budget", "spent < budget", "all may have the most bits"),
    ("10.5", "way[0] < longer[spent][0]", "way[0] > longer[spent][0]", "gains more"),
    ("10.5", "return min((error, total, chosen)", "return max((error, total, chosen)", "bits"),
    ("10.5", "min((error, total, chosen) for", "min((error, -total, chosen) for", "fewest bits"),
    ("10.5", "        return None\n", "        return []\n", "None where nothing fits"),
]


def _most_gain_first(sizes, errors, budget):
    """Greedy: lowest bits everywhere, then the step with the best gain for each bit."""
    chosen = [min(e) for e in errors]
    if sum(b * s for b, s in zip(chosen, sizes, strict=True)) > budget:
        return None
    while True:
        steps = []
        spent = sum(b * s for b, s in zip(chosen, sizes, strict=True))
        for i, (size, choices) in enumerate(zip(sizes, errors, strict=True)):
            for bits in choices:
                cost, gain = (bits - chosen[i]) * size, choices[chosen[i]] - choices[bits]
                if cost > 0 and gain > 0 and spent + cost <= budget:
                    steps.append((gain / cost, i, bits))
        if not steps:
            return chosen
        _, i, bits = max(steps)
        chosen[i] = bits


def _every_way(sizes, errors, budget):
    import itertools

    best = None
    for chosen in itertools.product(*errors):
        spent = sum(b * s for b, s in zip(chosen, sizes, strict=True))
        if spent <= budget:
            way = (sum(e[b] for e, b in zip(errors, chosen, strict=True)), spent, list(chosen))
            best = way if best is None else min(best, way)
    return best and best[2]


WRONG = [
    ("10.3", lambda w, h, scale, j: (w / scale).round() * scale, "columns"),
    (
        "10.4",
        lambda norm, gate, up, down, s_in, s_mid: (norm / s_in, gate * s_in, up * s_in, down),
        "multiplied by s_mid",
    ),
    ("10.5", _most_gain_first, "the best gain for each bit first"),
]


@pytest.mark.parametrize(("number", "answer", "words"), WRONG, ids=[f"{n} {i}" for i, (n, _, _) in enumerate(WRONG)])
def test_typical_wrong_answers_fail(number, answer, words):
    result = exercises.check(number, answer)
    assert result.state == "fail" and words in result.message, result


@pytest.mark.parametrize(("number", "old", "new", "words"), [case for case in WRONG_EDITS])
def test_a_solution_made_wrong_fails_with_the_property_named(number, old, new, words):
    result = exercises.check(number, edited(NAME, number, (old, new)))
    assert_names_what_broke(result, words)


def test_an_answer_in_float32_is_told_its_dtype():
    def fold(norm, gate, up, down, s_in, s_mid):
        norm, gate, up, down, s_in, s_mid = (t.float() for t in (norm, gate, up, down, s_in, s_mid))
        return norm / s_in, gate * s_in, up * s_in / s_mid[:, None], down * s_mid

    result = exercises.check("10.4", fold)
    assert_names_what_broke(result, "the output does not change")
    assert "float64 as given" in result.message and "from weights of torch.float32" in result.message, result


def test_trying_every_way_takes_too_long(monkeypatch):
    monkeypatch.setattr(exercises, "TIME_LIMIT_S", 1.0)
    result = exercises.check("10.5", _every_way)
    assert result.state == "fail" and "ran for more than" in result.message


RIGHT_EDITS = [
    ("10.1", "return total", "return float(total)"),
    ("10.1", "return total", "return np.int64(total)"),
    ("10.2", "return codes, scales, zeros", "return [codes.to(torch.uint8), scales.double(), zeros.to(torch.int32)]"),
    ("10.2", "scales[scales == 0] = 1.0", "scales[scales == 0] = 0.25"),
    ("10.2", "scales[scales == 0] = 1.0", "scales = scales + 1e-8"),
    ("10.2", "((w / scales).round() + zeros)", "(w / scales + zeros).round()"),
    ("10.3", "torch.linalg.inv(hessian[j:, j:])", "torch.cholesky_inverse(torch.linalg.cholesky(hessian[j:, j:]))"),
    ("10.3", "\n    return w", "\n    return w.numpy()"),
    ("10.4", "return norm / s_in", "return norm.div(s_in)"),
    ("10.5", "chosen) in best.items())[2]", "chosen) in best.items())[2] or []"),
    (
        "10.5",
        "min((error, total, chosen) for total, (error, chosen) in best.items())[2]",
        "np.array(min((error, total, chosen) for total, (error, chosen) in best.items())[2])",
    ),
]


@pytest.mark.parametrize(("number", "old", "new"), RIGHT_EDITS)
def test_a_right_answer_in_another_dress_passes(number, old, new):
    result = exercises.check(number, edited(NAME, number, (old, new)))
    assert result.state == "pass", result
