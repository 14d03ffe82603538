"""Notebook 11: methods leave the unrounded model as it was, broken twins are caught, exercises tell right from wrong."""

from __future__ import annotations

import importlib.util
from collections import Counter
from functools import cache

import notebook_cells
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook_cells import assert_names_what_broke, edited, tagged
from transformers import LlamaConfig, LlamaForCausalLM

from helpers import exercises, quality
from helpers.paths import ROOT
from helpers.quantize import Calibration, QuantizationError, fake_quantize, linear_layers

NAME = "11_activation_quantization"
CAUGHT = (
    AssertionError,
    LookupError,
    QuantizationError,
    ValueError,
    TypeError,
    RuntimeError,
    AttributeError,
    NameError,
)


@pytest.fixture(scope="module")
def nb(load_algorithms):
    return load_algorithms(NAME)


@cache
def tiny_config(bias: bool = False) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        max_position_embeddings=64,
        attention_bias=bias,
        mlp_bias=False,
        tie_word_embeddings=True,
        dtype=torch.float64,
    )


def tiny_model(bias: bool = False) -> LlamaForCausalLM:
    """A model as trained ones are: norms with scales of their own, biases that are not zero, an outlier channel."""
    torch.manual_seed(11)
    model = LlamaForCausalLM(tiny_config(bias)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(0.2 + 2 * torch.rand_like(parameter))
            if name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter))
        model.model.embed_tokens.weight *= 20
        model.model.embed_tokens.weight[:, 5] *= 30
        model.model.layers[0].mlp.up_proj.weight[7] *= 50
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


IDS = torch.randint(0, 97, (1, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: LlamaForCausalLM) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


def assert_same(a: torch.Tensor, b: torch.Tensor, rel: float = 1e-9) -> None:
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= rel * float(b.abs().max()), float((a - b).abs().max() / b.abs().max())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- eight bits ---------------------------------------------------------------------------------------------------------
def check_scales(nb):
    x = normal(5, 7)
    x[2] = 0
    x[:, 3] = 0
    x[1, 1] = -40.0
    for bits in (2, 4, 8):
        top = 2 ** (bits - 1) - 1
        assert nb.absmax_scale(x, bits, "tensor").reshape(-1).tolist() == pytest.approx([40 / top])
        rows, columns = nb.absmax_scale(x, bits, "row"), nb.absmax_scale(x, bits, "column")
        assert rows.shape == (5, 1) and columns.shape[-1] == 7 and columns.numel() == 7
        assert rows[0, 0] == pytest.approx(x[0].abs().max() / top) and rows[1, 0] == pytest.approx(40 / top)
        for over in nb.SHARED:
            scale = nb.absmax_scale(x, bits, over)
            codes = nb.to_codes(x, scale, bits)
            assert codes.dtype == torch.int8 and int(codes.abs().max()) == top
            back = nb.rounded(x, scale, bits)
            assert torch.equal(codes.double() * scale, back)
            assert bool(((back - x).abs() <= scale / 2 + 1e-12).all()) and bool((back[2] == 0).all())
    batch = normal(2, 3, 4)
    assert nb.absmax_scale(batch, 8, "row").shape == (2, 3, 1)
    assert nb.absmax_scale(batch, 8, "tensor").numel() == 1
    assert nb.absmax_scale(batch, 8, "column").flatten().tolist() == pytest.approx(
        (batch.abs().amax(dim=(0, 1)) / 127).tolist()
    )
    clipped = nb.rounded(torch.tensor([[5.0, -9.0]]), torch.tensor(0.01), 8)
    assert clipped.flatten().tolist() == pytest.approx([1.27, -1.27])
    assert nb.to_codes(torch.tensor([[5.0, -9.0]]), torch.tensor(0.01), 8).tolist() == [[127, -127]]
    for bits, over in ((1, "row"), (9, "row"), (8, "group"), (16, "tensor")):
        with pytest.raises(QuantizationError, match=r"layer 3.*\n.*2 to 8 bits"):
            nb.absmax_scale(x, bits, over, "layer 3")
    for bad in (float("nan"), float("inf")):
        with pytest.raises(QuantizationError, match="down_proj holds NaN"):
            nb.absmax_scale(torch.tensor([[1.0, bad]]), 8, "row", "down_proj")
    for shape in ((0, 7), (5, 0), (0,)):
        for over in nb.SHARED:
            with pytest.raises(QuantizationError, match="down_proj holds no values"):
                nb.absmax_scale(torch.zeros(shape), 8, over, "down_proj")


def check_zeros(nb):
    """A part without extent has a positive scale."""
    x = torch.zeros(2, 3)
    for over in nb.SHARED:
        assert bool((nb.absmax_scale(x, 8, over) > 0).all()) and bool(
            (nb.rounded(x, nb.absmax_scale(x, 8, over), 8) == 0).all()
        )


def test_a_tensor_of_zeros_has_a_scale(nb):
    check_zeros(nb)


def test_scales_are_shared_by_what_was_asked_for(nb):
    check_scales(nb)


def check_int8(nb):
    """The integer product equals exact integer arithmetic, and the fake-quantized layer."""
    x, w = normal(9, 64).float(), normal(16, 64, seed=1).float()
    x[4, 7] = 300
    x[5] = 0
    w_scale = nb.absmax_scale(w, 8, "row")
    w_codes = nb.to_codes(w, w_scale, 8)
    got = nb.int8_linear(x, w_codes, w_scale)
    x_scale = nb.absmax_scale(x, 8, "row")
    sums = nb.to_codes(x, x_scale, 8).long() @ w_codes.long().T
    assert_same(got.double(), sums.double() * x_scale.double() * w_scale.double().T, 1e-6)
    assert_same(got, F.linear(nb.rounded(x, x_scale, 8), nb.rounded(w, w_scale, 8)), 1e-5)
    one_by_one = torch.cat([nb.int8_linear(row[None], w_codes, w_scale) for row in x])
    assert_same(got, one_by_one, 1e-6)
    with pytest.raises(QuantizationError, match="up_proj holds NaN"):
        nb.int8_linear(torch.full((2, 64), float("nan")), w_codes, w_scale, "up_proj")


def test_int8_is_what_fake_quantization_says(nb):
    check_int8(nb)


def check_computing(nb):
    model = tiny_model(bias=True)
    before = logits(model)
    seen = []

    def exact(name, w):
        seen.append(name)
        return lambda x: F.linear(x, w)

    with nb.computing(model, exact):
        assert_same(logits(model), before)
    assert seen == list(linear_layers(model)) and not any("lm_head" in name for name in seen)
    with nb.computing(model, nb.quantized(nb.dynamic(4, "row"), nb.untouched)):
        assert float((logits(model) - before).abs().max()) > 1e-3
    assert torch.equal(logits(model), before), "the model computes as before"
    with pytest.raises(ZeroDivisionError), nb.computing(model, exact):
        raise ZeroDivisionError
    assert torch.equal(logits(model), before)
    with Calibration(linear_layers(model), hessians=False) as calibrated:
        logits(model)
    absmax = calibrated.absmax
    fixed = nb.static(absmax, 8)
    name = "model.layers.0.mlp.down_proj"
    step = float(absmax[name].max()) / 127
    x = torch.linspace(-1, 1, 9)[None].double() * float(absmax[name].max()) * 2
    assert_same(fixed(name, x), (x / step).round().clamp(-127, 127) * step, 1e-6)
    with pytest.raises(QuantizationError, match="gate_proj holds NaN"):
        nb.static({"model.layers.0.mlp.gate_proj": torch.tensor([1.0, float("nan")])}, 8)
    with pytest.raises(QuantizationError, match=r"layers\.9\.mlp\.up_proj has no static scale"):
        fixed("model.layers.9.mlp.up_proj", x)


def test_a_model_computes_otherwise_inside_the_block_only(nb):
    check_computing(nb)


def test_an_empty_calibration_names_the_layer(nb):
    model = tiny_model()
    with pytest.raises(QuantizationError, match=r"model\.layers\.0"), Calibration(linear_layers(model), hessians=False):
        pass


def check_scale_bits(nb):
    """The share of scales, counted: layers of different widths weigh by their size."""
    layers = linear_layers(tiny_model())
    n_bits = sum(16 * len(layer.weight) for layer in layers.values())
    n_weights = sum(layer.weight.numel() for layer in layers.values())
    assert nb.scale_bits(layers) == pytest.approx(n_bits / n_weights)
    assert nb.scale_bits(layers, 32) == pytest.approx(2 * n_bits / n_weights)
    wide = {"a": torch.nn.Linear(10, 30), "b": torch.nn.Linear(90, 10)}
    assert nb.scale_bits(wide) == pytest.approx(16 * 40 / 1200)


def test_bits_of_scales_are_counted_over_all_layers(nb):
    check_scale_bits(nb)


# -- LLM.int8() ---------------------------------------------------------------------------------------------------------
def check_llm_int8(nb):
    x, w = normal(2, 5, 32), normal(12, 32, seed=1)
    x[0, 1, 3], x[1, 4, 9] = -60.0, 80.0
    plain = nb.quantized(nb.dynamic(8, "row"), nb.dynamic(8, "row"))("layer", w)(x)
    count = Counter()
    assert_same(nb.llm_int8(float("inf"), count)("layer", w)(x), plain)
    assert count["int8"] == 10 * 12 * 32 and count["16 bits"] == 0
    assert_same(nb.llm_int8(0.0)("layer", w)(x), F.linear(x, w))
    count = Counter()
    y = nb.llm_int8(6.0, count)("a.down_proj", w)(x)
    assert count["16 bits"] == 10 * 12 * 2 and count["int8"] == 10 * 12 * 30 and count["down_proj", "columns"] == 2
    keep = [i for i in range(32) if i not in (3, 9)]
    w_rounded = nb.rounded(w, nb.absmax_scale(w, 8, "row"), 8)
    quiet = x[..., keep]
    expected = F.linear(nb.rounded(quiet, nb.absmax_scale(quiet, 8, "row"), 8), w_rounded[:, keep])
    assert_same(y, expected + F.linear(x[..., [3, 9]], w[:, [3, 9]]))
    exact = F.linear(x, w)
    assert float((y - exact).norm()) < 0.2 * float((plain - exact).norm())


def test_outlier_columns_are_split_off_and_counted(nb):
    check_llm_int8(nb)


# -- SmoothQuant --------------------------------------------------------------------------------------------------------
def check_smoothing_scale(nb):
    x, w = torch.tensor([4.0, 100.0, 0.0, 3.0]).double(), torch.tensor([1.0, 0.25, 2.0, 0.0]).double()
    assert nb.smoothing_scale(x, w, 0.5).tolist() == pytest.approx([2.0, 20.0, 1.0, 1.0])
    assert nb.smoothing_scale(x, w, 1.0).tolist() == pytest.approx([4.0, 100.0, 1.0, 1.0])
    assert nb.smoothing_scale(x, w, 0.0).tolist() == pytest.approx([1.0, 4.0, 1.0, 1.0])
    assert nb.smoothing_scale(x, w, 0.75)[1] == pytest.approx(100**0.75 / 0.25**0.25)
    for alpha in (-0.1, 1.5, float("nan")):
        with pytest.raises(QuantizationError, match="o_proj: alpha"):
            nb.smoothing_scale(x, w, alpha, "o_proj")
    for bad in (float("nan"), float("inf")):
        with pytest.raises(QuantizationError, match="gate_proj: a maximum is NaN"):
            nb.smoothing_scale(torch.tensor([1.0, bad]), torch.ones(2), 0.5, "gate_proj")


def absmax_of(model) -> dict[str, torch.Tensor]:
    with Calibration(linear_layers(model), hessians=False) as seen:
        logits(model)
    return seen.absmax


def check_smooth(nb):
    for bias in (False, True):
        for alpha, everywhere in ((0.5, True), (0.8, True), (0.5, False), (1.0, True)):
            model = tiny_model(bias)
            before, absmax = logits(model), absmax_of(model)
            weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
            with nb.edited(model):
                new = nb.smooth(model, absmax, alpha, everywhere)
                assert_same(logits(model), before, 1e-9)
                found = absmax_of(model)
                for name in found:
                    assert_same(new[name].double(), found[name].double(), 1e-4)
                layer = model.model.layers[0]
                x, w = absmax["model.layers.0.mlp.down_proj"].double(), weights["model.layers.0.mlp.down_proj.weight"]
                s = x**alpha / w.abs().amax(dim=0) ** (1 - alpha) if everywhere else torch.ones_like(x)
                assert_same(layer.mlp.down_proj.weight, w * s, 1e-5)
                x = absmax["model.layers.0.self_attn.o_proj"].double().view(2, 3, 8).amax(dim=1)
                w = weights["model.layers.0.self_attn.o_proj.weight"].abs().amax(dim=0).view(2, 3, 8).amax(dim=1)
                s = (x**alpha / w ** (1 - alpha)).flatten() if everywhere else torch.ones(16).double()
                changed = layer.self_attn.v_proj.weight.norm(dim=1) / layer.self_attn.v_proj.weight[0].norm()
                old = weights["model.layers.0.self_attn.v_proj.weight"]
                norm_s = layer.input_layernorm.weight / weights["model.layers.0.input_layernorm.weight"]
                expected = (old / norm_s / s[:, None]).norm(dim=1)
                assert_same(changed, expected / expected[0], 1e-5)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, weights[name]), f"{name} was not put back"
            assert torch.equal(logits(model), before)


def check_smoothing_helps(nb):
    """With outliers as real models have them, static W8A8 loses most of its error, and the wrong side loses nothing."""
    model = tiny_model()
    before, absmax = logits(model), absmax_of(model)
    errors = {}
    for alpha in (None, 0.5):
        with nb.edited(model):
            now = absmax if alpha is None else nb.smooth(model, absmax, alpha)
            with nb.computing(model, nb.quantized(nb.dynamic(8, "row"), nb.static(now, 8))):
                errors[alpha] = float((logits(model) - before).norm())
    assert errors[0.5] < 0.8 * errors[None], errors


def test_smoothing_scales_are_the_papers(nb):
    check_smoothing_scale(nb)


def test_a_smoothed_model_is_the_same_model(nb):
    check_smooth(nb)


def test_smoothing_helps_where_scales_are_static(nb):
    check_smoothing_helps(nb)


def check_edited(nb):
    model = tiny_model()
    before = logits(model)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(ZeroDivisionError), nb.edited(model):
        nb.fold_norms(model)
        model.model.layers[1].mlp.up_proj.weight.data = torch.zeros(80, 48).double()
        raise ZeroDivisionError
    assert torch.equal(logits(model), before)
    assert tied == (model.lm_head.weight is model.model.embed_tokens.weight)


def test_edits_are_undone_even_after_an_error(nb):
    check_edited(nb)


# -- QuaRot -------------------------------------------------------------------------------------------------------------
def check_hadamard(nb):
    for n in (1, 2, 4, 8, 12, 20, 24, 28, 36, 64, 72, 76, 96, 140, 148, 576, 1536):
        a, b = nb.hadamard_factors(n)
        h = torch.kron(a, b)
        assert h.shape == (n, n) and len(a) & (len(a) - 1) == 0
        assert torch.allclose(h @ h.T, torch.eye(n).double(), atol=1e-10), n
        assert torch.allclose(h.abs(), torch.full((n, n), n**-0.5).double(), atol=1e-12), n
        x = normal(2, 3, n)
        assert_same(nb.times_hadamard(x, (a, b)), x @ h, 1e-10)
    for n, small in {576: 36, 1536: 12, 5120: 20, 8960: 140, 14336: 28, 4096: 1, 896: 28, 4864: 76, 72: 36}.items():
        a, b = nb.hadamard_factors(n)
        assert len(b) == small and len(a) * len(b) == n, (n, len(a), len(b))
    for n in (-4, 0, 3, 5, 7, 18, 50, 92, 92 + 1, 172):
        with pytest.raises(QuantizationError, match=f"order {n}"):
            nb.hadamard_factors(n)


def check_rotation(nb):
    for bias in (False, True):
        model = tiny_model(bias)
        before = logits(model)
        for rotation in (torch.kron(*nb.hadamard_factors(48)), torch.linalg.qr(normal(48, 48))[0]):
            for head_rotation in (None, torch.kron(*nb.hadamard_factors(8)), torch.linalg.qr(normal(8, 8, seed=3))[0]):
                with nb.edited(model):
                    nb.fold_norms(model)
                    assert_same(logits(model), before, 1e-5)  # Transformers normalises in float32
                    assert all(bool((p == 1).all()) for name, p in model.named_parameters() if "norm" in name)
                    nb.rotate(model, rotation, head_rotation)
                    assert_same(logits(model), before, 1e-5)
                    states = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
                    with nb.computing(model, nb.online_hadamard(nb.quantized(nb.untouched_w, nb.untouched), nb.mlp)):
                        assert_same(logits(model), before, 1e-5)
                plain = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
                assert_same(states[1], plain[1] @ rotation, 1e-5)
        assert torch.equal(logits(model), before)


def prepared(nb):
    """The namespace with what the notebook defines beside its algorithms."""
    nb.untouched_w = lambda name, w: w
    nb.mlp = nb.hadamard_factors(80)
    return nb


def check_online(nb):
    """Only down_proj is rotated online, its weight along, and rounding happens in rotated coordinates."""
    factors, w, x = nb.hadamard_factors(80), normal(12, 80), normal(4, 80, seed=1)
    x[:, 3] *= 100
    h = torch.kron(*factors)
    build = nb.online_hadamard(nb.quantized(nb.dynamic(4, "row"), nb.dynamic(4, "row")), factors)
    expected = F.linear(
        nb.rounded(x @ h, nb.absmax_scale(x @ h, 4, "row"), 4), nb.rounded(w @ h, nb.absmax_scale(w @ h, 4, "row"), 4)
    )
    assert_same(build("model.layers.0.mlp.down_proj", w)(x), expected, 1e-9)
    plain = nb.quantized(nb.dynamic(4, "row"), nb.dynamic(4, "row"))("o_proj", w)(x)
    assert_same(build("model.layers.0.self_attn.o_proj", w)(x), plain)


def check_kv(nb):
    from transformers import AttentionInterface

    model = tiny_model()
    before = logits(model)
    key, value, query = normal(1, 2, 10, 8), normal(1, 2, 10, 8, seed=1), normal(1, 6, 10, 8, seed=2)
    key[0, 0, 3] *= 100
    value[0, 1, :, 5] += 7
    module = model.model.layers[0].self_attn
    r = torch.linalg.qr(normal(8, 8, seed=4))[0]

    def stored(x):
        return torch.stack([fake_quantize(head, 4, -1, False) for head in x[0]])[None]

    for rotation in (None, r):
        with nb.quantized_kv(model, 4, rotation):
            attend = AttentionInterface()["quantized_kv"]
            got, _ = attend(module, query, key, value, None, scaling=0.3)
            q, k = (query, key) if rotation is None else (query @ r, key @ r)
            k, v = (stored(t).repeat_interleave(3, dim=1) for t in (k, value))
            expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3).transpose(1, 2)
            assert_same(got, expected, 1e-9)
            assert float((logits(model) - before).abs().max()) > 1e-6
        assert torch.equal(logits(model), before)
    with nb.quantized_kv(model, 8, r):
        assert_same(logits(model), before, 0.05)
    with pytest.raises(QuantizationError, match="KV cache: 16 bits"), nb.quantized_kv(model, 16):
        logits(model)
    assert torch.equal(logits(model), before)


def test_hadamard_matrices_of_many_orders(nb):
    check_hadamard(nb)


def test_a_rotated_model_is_the_same_model(nb):
    check_rotation(prepared(nb))


def test_the_online_rotation_is_down_projs(nb):
    check_online(nb)


def test_the_kv_cache_is_rounded_by_token_and_head(nb):
    check_kv(nb)


def test_a_rotation_flattens_an_outlier_and_a_permutation_does_not(nb):
    x = normal(64, 96)
    x[:, 11] *= 40
    h = torch.kron(*nb.hadamard_factors(96))
    permutation = torch.eye(96).double()[torch.randperm(96)]

    def error(r):
        turned = x @ r
        return float((nb.rounded(turned, nb.absmax_scale(turned, 4, "row"), 4) @ r.T - x).norm())

    assert error(permutation) == pytest.approx(error(torch.eye(96).double()))
    assert error(h) < 0.8 * error(permutation)


# -- SpinQuant ----------------------------------------------------------------------------------------------------------
def spin_samples():
    samples = []
    for seed in range(2):
        x = normal(32, 24, seed=seed)
        x[:, 3] *= 40
        samples.append((x, normal(16, 24, seed=seed + 5)))
    return samples


def check_cayley(nb):
    rotation = torch.linalg.qr(normal(24, 24))[0]
    target = normal(24, 24, seed=2)
    for size in (0.0, 0.01, 0.3, 2.0):
        stepped = nb.cayley_step(rotation, target, size)
        assert torch.allclose(stepped.T @ stepped, torch.eye(24).double(), atol=1e-10)
        if size == 0.0:
            assert torch.allclose(stepped, rotation)
    # The loss <target, R> has the gradient `target`; a small step must lower it, by the first order of its size.
    small = nb.cayley_step(rotation, target, 1e-4)
    assert float((target * small).sum()) < float((target * rotation).sum())
    a = target @ rotation.T - rotation @ target.T
    a = a * (0.3 / torch.linalg.matrix_norm(a, 2))
    unit = torch.eye(24).double()
    assert_same(nb.cayley_step(rotation, target, 0.3), torch.linalg.inv(unit + a / 2) @ (unit - a / 2) @ rotation, 1e-9)


def check_spin(nb):
    samples = spin_samples()
    x, w = samples[0]
    r = torch.linalg.qr(normal(24, 24))[0]
    got = nb.rounded(x @ r, nb.absmax_scale(x @ r, 4, "row"), 4) @ (w @ r).T
    alone = float(((got - x @ w.T) ** 2).sum() / ((x @ w.T) ** 2).sum())
    assert float(nb.rotated_error(r, samples[:1])) == pytest.approx(alone)
    # The gradient of sum(c * through(x)): c, and for the largest entry, which is the scale, what the row lost by rounding.
    leaf, c = x.clone().requires_grad_(), normal(*x.shape, seed=8)
    (gradient,) = torch.autograd.grad((nb.through(leaf, 4) * c).sum(), leaf)
    steps = x / nb.absmax_scale(x, 4, "row")
    expected, top = c.clone(), x.abs().argmax(dim=1)
    rows = torch.arange(len(x))
    expected[rows, top] += (c * (steps.round() - steps)).sum(dim=1) * x[rows, top].sign() / 7
    assert_same(gradient, expected, 1e-9)
    first = torch.linalg.qr(normal(24, 24, seed=9))[0]
    best, losses = nb.learn_rotation(first, samples, 25)
    assert len(losses) == 26 and torch.allclose(best.T @ best, torch.eye(24).double(), atol=1e-8)
    assert float(nb.rotated_error(best, samples)) == pytest.approx(min(losses)) and min(losses) < 0.9 * losses[0]
    same, only = nb.learn_rotation(first, samples, 0)
    assert torch.equal(same, first) and len(only) == 1


def test_cayley_steps_stay_rotations_and_go_down(nb):
    check_cayley(nb)


def test_a_learned_rotation_is_the_best_one_met(nb):
    check_spin(nb)


# -- QServe -------------------------------------------------------------------------------------------------------------
def check_progressive(nb):
    w = normal(12, 96)
    w[3] = 0
    w[4] = 2.5
    w[5] = -w[5].abs()
    w[6, 10] = 60
    codes, scales, zeros, channel = nb.progressive(w, 32)
    assert codes.shape == (12, 96) and scales.shape == zeros.shape == (12, 3) and channel.shape == (12, 1)
    assert int(codes.min()) >= 0 and int(codes.max()) <= 15 and int(zeros.min()) >= 0 and int(zeros.max()) <= 15
    assert int(scales.min()) >= 1 and not torch.is_floating_point(scales) and not torch.is_floating_point(zeros)
    values = nb.to_int8_range(codes, scales, zeros)
    assert values.shape == w.shape and int(values.abs().max()) <= 127
    back = values * channel
    q0 = (w / channel).round()
    groups = q0.view(12, 3, 32)
    span = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
    assert torch.equal(scales.double(), (span / 15).round().clamp(min=1))
    bound = torch.maximum(scales.double(), span - 14 * scales)[..., None].expand(-1, -1, 32).reshape(12, 96)
    assert bool(((values - q0).abs() <= bound).all())
    assert bool((back[3] == 0).all()) and float((back - w).norm() / w.norm()) < 0.12
    for group_size in (36, 0, 97):
        with pytest.raises(QuantizationError, match=r"gate_proj: groups of .*\n.*Legal group sizes"):
            nb.progressive(w, group_size, name="gate_proj")
    with pytest.raises(QuantizationError, match="k_proj holds NaN"):
        nb.progressive(torch.full((2, 32), float("nan")), 32, name="k_proj")


def check_protection(nb, top=None):
    """All groups that can occur, by their two ends: rows whose largest integer is the protective top."""
    options = {} if top is None else {"top": top}
    limit = top or 119
    ends = torch.arange(-limit, limit + 1).double()
    pairs = torch.cartesian_prod(ends, ends)
    fillers = torch.stack([pairs.mean(dim=1).round(), torch.zeros(len(pairs))], dim=1)
    group = torch.cat([pairs, fillers], dim=1)
    marker = torch.tensor([[limit, -limit, 0, 0]]).double().expand(len(group), -1)
    codes, scales, zeros, channel = nb.progressive(torch.cat([group, marker], dim=1), 4, **options)
    assert torch.allclose(channel, torch.ones(1, 1).double())
    values = nb.to_int8_range(codes, scales, zeros)
    assert int(values.max()) <= 127 and int(values.min()) >= -128, (int(values.min()), int(values.max()))


def check_packed(nb):
    """All codes, scales and zeros whose values fit: four different weights in a word."""
    rows = []
    for scale in range(1, 18):
        for zero in range(16):
            fitting = [code for code in range(16) if -128 <= (code - zero) * scale <= 127]
            codes = torch.tensor([fitting[i % len(fitting)] for i in range(len(fitting) + (-len(fitting)) % 4)])
            for order in (codes, codes.flip(0)):
                words = nb.pack(order)
                rows.append(words)
                assert int(words.max()) <= 0xFFFFFFFF and words.shape == (len(order) // 4,)
                got = nb.unpack_int8(nb.multiply_then_subtract(words, torch.tensor(scale), torch.tensor(zero)))
                assert got.tolist() == [(int(code) - zero) * scale for code in order], (scale, zero)
    assert nb.unpack_int8(nb.pack(torch.tensor([[1, 2, 3, 255]]))).tolist() == [[1, 2, 3, -1]]
    wrong = nb.unpack_int8(
        nb.subtract_then_multiply(nb.pack(torch.tensor([1, 9, 0, 3])), torch.tensor(7), torch.tensor(4))
    )
    assert wrong.tolist() != [(code - 4) * 7 for code in (1, 9, 0, 3)], "the wrong order is wrong"


def check_tiles(nb):
    m, n, k, g = 6, 8, 64, 16
    x, w = normal(m, k).float(), normal(n, k, seed=1).float()
    exact = x @ w.T
    # Eight weights: W4A16 unpacks in 5 steps, then 4 pairs are converted and scaled; W4A8 unpacks in 3, then 2 words of
    # four are multiplied and subtracted from.
    loops = {"W8A8": 0, "W4A16": n * k // 8 * 13, "W4A4": 2 * m * n * (k // g), "W4A8": n * k // 8 * 7}
    ends = {"W8A8": 2 * m * n, "W4A16": 0, "W4A4": m * n, "W4A8": 2 * m * n}
    errors = {}
    for kind in loops:
        count = Counter()
        got = nb.tile_product(kind, x, w, g, count)
        assert count["in the main loop"] == loops[kind] and count["at the end"] == ends[kind], (kind, count)
        errors[kind] = float((got - exact).norm() / exact.norm())
    assert errors["W8A8"] < 0.02 and errors["W4A16"] < 0.15 and errors["W4A8"] < 0.15 and errors["W4A4"] < 0.3, errors
    codes, scales, zeros, channel = nb.progressive(w, g)
    x_rounded = nb.rounded(x, nb.absmax_scale(x, 8, "row"), 8)
    expected = x_rounded @ (nb.to_int8_range(codes, scales, zeros) * channel).T
    assert_same(nb.tile_product("W4A8", x, w, g, Counter()), expected, 1e-5)
    four = torch.cat([nb.rounded(p, nb.absmax_scale(p, 4, "row"), 4) for p in w.split(g, dim=1)], dim=1)
    assert_same(nb.tile_product("W4A16", x, w, g, Counter()), x @ four.T, 1e-5)
    assert_same(
        nb.tile_product("W4A4", x, w, g, Counter()), nb.rounded(x, nb.absmax_scale(x, 4, "row"), 4) @ four.T, 1e-5
    )
    for kind in loops:
        whole = nb.tile_product(kind, x, w, -1, Counter())
        assert torch.equal(whole, nb.tile_product(kind, x, w, k, Counter())) and bool((whole != 0).any())
        for group_size in (0, 24, 100, -2):
            with pytest.raises(QuantizationError, match=rf"{kind}: groups of {group_size} do not divide"):
                nb.tile_product(kind, x, w, group_size, Counter())
    with pytest.raises(QuantizationError, match=r"no kind 'W2A8'.*\n.*W8A8, W4A16, W4A4, W4A8"):
        nb.tile_product("W2A8", x, w, g, Counter())
    # QServe does fewer operations than W4A4 from 7/16 of a group's size in tokens on, and always fewer than W4A16.
    for tokens in (4, 7, 8, 40):
        counts = {kind: Counter() for kind in ("W4A16", "W4A4", "W4A8")}
        for kind, count in counts.items():
            nb.tile_product(kind, normal(tokens, k).float(), w, g, count)
        loop = {kind: count["in the main loop"] for kind, count in counts.items()}
        assert loop["W4A8"] < loop["W4A16"] and (loop["W4A8"] < loop["W4A4"]) == (tokens > 7 * g / 16)


def test_progressive_quantization(nb):
    check_progressive(nb)


def test_the_protective_range_holds_for_every_group_and_is_tight(nb):
    check_protection(nb)
    with pytest.raises(AssertionError):
        check_protection(nb, top=120)


def test_four_weights_in_a_word(nb):
    check_packed(nb)


def test_tiles_compute_and_count(nb):
    check_tiles(nb)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([16, 32, 48]), st.floats(-3, 3))
def test_random_weights_never_leave_int8(seed, group_size, tilt):
    nb = notebook_cells.define(NAME, ["\n\n".join(tagged(NAME, "algorithm"))]) if not _CACHE else _CACHE[0]
    _CACHE[:] = [nb]
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(6, 96, generator=generator).exp() * torch.randn(6, 96, generator=generator).sign() + tilt
    codes, scales, zeros, _ = nb["progressive"](w, group_size)
    values = nb["to_int8_range"](codes, scales, zeros)
    assert int(values.min()) >= -128 and int(values.max()) <= 127


_CACHE: list = []


# -- FP8 ----------------------------------------------------------------------------------------------------------------
def check_fp8(nb):
    for kind, theirs in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        every = torch.arange(256, dtype=torch.uint8).view(theirs).float()
        finite = every[every.isfinite()]
        assert torch.equal(nb.to_fp8(finite, kind), finite), "what is an FP8 value already stays"
        assert float(finite.max()) == nb.FP8[kind][2]
        values = finite.sort().values
        middle = (values[1:] + values[:-1]) / 2
        x = torch.cat([middle, middle * 1.0001, middle * 0.9999, normal(5000).float() * 3, normal(5000).float() * 1e-4])
        assert torch.equal(nb.to_fp8(x, kind), x.to(theirs).float())
        assert nb.to_fp8(torch.tensor([1e9, -1e9, 0.0]), kind).tolist() == [nb.FP8[kind][2], -nb.FP8[kind][2], 0.0]
    x = normal(32, 64).float()
    x[3, 5], x[0], x[:, 40:48] = 1e6, 0.0, 0.0
    whole = nb.fp8_rounded(x, "e4m3")
    scale = x.abs().max() / 448
    assert_same(whole, (x / scale).to(torch.float8_e4m3fn).float() * scale, 1e-6)
    rows = nb.fp8_rounded(x, "e4m3", 16)
    for i in range(32):
        for j in range(0, 64, 16):
            assert torch.equal(rows[i, j : j + 16], nb.fp8_rounded(x[i, j : j + 16], "e4m3")), (i, j)
    square = nb.fp8_rounded(x, "e4m3", 16, square=True)
    for i in range(0, 32, 16):
        for j in range(0, 64, 16):
            assert torch.equal(square[i : i + 16, j : j + 16], nb.fp8_rounded(x[i : i + 16, j : j + 16], "e4m3"))
    assert nb.fp8_rounded(x[None], "e4m3", 16).shape == (1, 32, 64)
    with pytest.raises(QuantizationError, match="Legal: e4m3, e5m2"):
        nb.to_fp8(x, "e3m4")
    with pytest.raises(QuantizationError, match="Legal: e4m3, e5m2"):
        nb.fp8_rounded(x, "e3m4")
    for bad in (float("nan"), float("inf"), -float("inf")):
        y = x.clone()
        y[7, 9] = bad
        for options in ({}, {"block": 16}, {"block": 16, "square": True}):
            with pytest.raises(QuantizationError, match="up_proj holds NaN"):
                nb.fp8_rounded(y, "e4m3", name="up_proj", **options)
    assert torch.equal(nb.fp8_rounded(x, "e4m3", -1), nb.fp8_rounded(x, "e4m3", 64))
    with pytest.raises(QuantizationError, match=r"up_proj: groups of .*\n.*Legal group sizes.* -1"):
        nb.fp8_rounded(torch.ones(8, 96), "e4m3", 36, name="up_proj")
    with pytest.raises(QuantizationError, match="up_proj: blocks of 16 do not divide its 24 outputs"):
        nb.fp8_rounded(torch.ones(24, 64), "e4m3", 16, True, "up_proj")


def test_fp8_is_torchs_and_blocks_have_scales_of_their_own(nb):
    check_fp8(nb)


# -- the checkpoint -----------------------------------------------------------------------------------------------------
def check_export(nb):
    model = tiny_model(bias=True)
    tensors = nb.w8a8_tensors(model)
    names, linears = set(tensors), linear_layers(model)
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
    for name, layer in linears.items():
        codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        assert codes.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (len(codes), 1)
        w = layer.weight.float()
        assert_same(codes.float() * scale, nb.rounded(w, nb.absmax_scale(w, 8, "row"), 8), 1e-6)
        assert float((codes.float() * scale - w).norm() / w.norm()) < 0.02
    assert all(t.dtype == torch.bfloat16 for name, t in tensors.items() if name.endswith(("bias", "norm.weight")))
    config = nb.w8a8_config()
    group = config["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "channel" and not group["weights"]["dynamic"]
    assert group["input_activations"]["strategy"] == "token" and group["input_activations"]["dynamic"]
    compressed_tensors = pytest.importorskip("compressed_tensors.quantization")
    parsed = compressed_tensors.QuantizationConfig.model_validate(config)
    assert parsed.config_groups["group_0"].weights.num_bits == 8 and parsed.format == "int-quantized"


def test_the_checkpoint_holds_the_codes(nb):
    check_export(nb)


def test_transformers_reads_the_checkpoint_and_gives_the_twins_logits(nb, tmp_path):
    """Written, loaded by Transformers through compressed-tensors, and equal to the fake-quantized model but for bf16."""
    import json

    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    pytest.importorskip("compressed_tensors")
    model = tiny_model()
    save_file(nb.w8a8_tensors(model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    described = {**model.config.to_dict(), "quantization_config": nb.w8a8_config(), "dtype": "float32"}
    described["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        got = loaded(IDS, use_cache=False).logits
    rounded = tiny_model()
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    for name, layer in linear_layers(rounded).items():
        layer.weight.data = dict(linear_layers(model))[name].weight.data.float()
    with nb.computing(rounded.float(), nb.quantized(nb.dynamic(8, "row"), nb.dynamic(8, "row"))):
        expected = logits(rounded)
    assert float((got - expected).norm() / expected.norm()) < 0.02


def test_the_toolboxs_perplexity_is_the_courses():
    """The script that runs in another environment judges by the same protocol."""
    spec = importlib.util.spec_from_file_location(
        "int8_libraries", ROOT / "helpers" / "toolboxes" / "int8_libraries.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    model, ids = tiny_model().float(), torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(3))
    expected = quality.perplexity(lambda chunk: model(chunk).logits, ids, window=16, corpus="-").value
    assert script.perplexity(model, ids.tolist(), 16) == pytest.approx(expected, rel=1e-5)
    asked = {"model": "nowhere", "window": 16, "evaluation": [], "calibration": [[1]], "alpha": 0.5}
    (row,) = script.main({**asked, "threads": torch.get_num_threads(), "methods": ["torchao int8 dynamic"]})["rows"]
    assert row["perplexity"] is None and row["error"] and "\n" not in row["error"]


# -- broken twins -------------------------------------------------------------------------------------------------------
TWINS = {
    "a scale for the tensor where a token's was asked": ('"row": (-1,)', '"row": tuple(range(x.dim()))', check_scales),
    "columns and rows swapped": (
        '"row": (-1,), "column": tuple(range(x.dim() - 1))',
        '"column": (-1,), "row": tuple(range(x.dim() - 1))',
        check_scales,
    ),
    "values cut instead of rounded": ("(x / scale).round_()", "(x / scale).trunc_()", check_scales),
    "values beyond the largest code": (".round_().clamp_(-top, top)", ".round_()", check_scales),
    "zero divided by zero": ("torch.where(largest > 0, largest, 1.0) / (2 **", "largest / (2 **", check_zeros),
    "NaN goes through": (
        "= x.abs().amax(dim=dims, keepdim=True)\n    if not bool(torch.isfinite(largest).all()):",
        "= x.abs().amax(dim=dims, keepdim=True)\n    if False:",
        check_scales,
    ),
    "an empty tensor fails in PyTorch": ("    if x.numel() == 0:\n", "    if False:\n", check_scales),
    "a layer without maxima": ("        if name not in scales:\n", "        if False:\n", check_computing),
    "a width for all layers": (
        "bits * n_scales / sum(layer.weight.numel() for layer in layers.values())",
        "bits / next(iter(layers.values())).in_features",
        check_scale_bits,
    ),
    "codes cut instead of rounded": (
        "(x / scale).round().clamp(-top, top)",
        "(x / scale).clamp(-top, top)",
        check_scales,
    ),
    "codes wrap round": (".round().clamp(-top, top)", ".round()", check_scales),
    "the weight's scale is forgotten": (
        "sums.to(x.dtype) * x_scale * w_scale.t()",
        "sums.to(x.dtype) * x_scale",
        check_int8,
    ),
    "one scale for all tokens in int8": (
        'x_scale = absmax_scale(x, 8, "row", name)\n    codes',
        'x_scale = absmax_scale(x, 8, "tensor", name)\n    codes',
        check_int8,
    ),
    "the old forward is not put back": ('vars(linear).pop("forward", None)', "pass", check_computing),
    "the bias is forgotten": ("return compute(x) + bias", "return compute(x)", check_computing),
    "a static scale that is taken anew": (
        "rounded(x, scales[name], bits)",
        'rounded(x, absmax_scale(x, bits, "tensor"), bits)',
        check_computing,
    ),
    "only positive outliers are seen": ("(rows.abs() > threshold)", "(rows > threshold)", check_llm_int8),
    "outliers stay in the int8 part": ("regular = rows.masked_fill(outlier, 0.0)", "regular = rows", check_llm_int8),
    "outliers are rounded too": (
        "F.linear(rows[:, outlier], w[:, outlier])",
        "F.linear(rows[:, outlier], w_rounded[:, outlier])",
        check_llm_int8,
    ),
    "int8 work counted without the split": ("(rows.shape[1] - n_outlier)", "rows.shape[1]", check_llm_int8),
    "alpha on the wrong side": (
        "x_absmax**alpha / w_absmax ** (1 - alpha)",
        "x_absmax ** (1 - alpha) / w_absmax**alpha",
        check_smoothing_scale,
    ),
    "dead channels give infinite scales": (
        "torch.where((x_absmax > 0) & (w_absmax > 0), scale, 1.0)",
        "scale",
        check_smoothing_scale,
    ),
    "the norm is multiplied": ("source.weight / s.view(shape)", "source.weight * s.view(shape)", check_smooth),
    "the bias of v is not smoothed": ("source.bias.data = source.bias / s", "pass", check_smooth),
    "the reader's scale is not undone": (
        "linear.weight.data = linear.weight * spread(s).to(linear.weight.dtype)",
        "pass",
        check_smooth,
    ),
    "maxima are not updated": ("absmax[name] = absmax[name] / spread(s)", "pass", check_smooth),
    "KV heads repeated in the wrong order": (
        "channels.view(n_kv_heads, 1, head_dim).expand(-1, q_per_kv, -1).flatten()",
        "channels.repeat(q_per_kv)",
        check_smooth,
    ),
    "only the first query head is asked": (
        ".amax(dim=1).flatten()\n\n    def spread",
        "[:, 0].flatten()\n\n    def spread",
        check_smooth,
    ),
    "weights are not put back": ("            parameter.data = data\n", "            pass\n", check_edited),
    "the head stays untied": ("        model.lm_head.weight = head\n", "        pass\n", check_edited),
    "an unfolded norm scale": (
        "            reader.weight.data = reader.weight * norm.weight\n",
        "            pass\n",
        check_rotation,
    ),
    "a norm that keeps its scale": (
        "        norm.weight.data = torch.ones_like(norm.weight)\n",
        "        pass\n",
        check_rotation,
    ),
    "the MLP's norm forgotten": (
        "layer.mlp.gate_proj, layer.mlp.up_proj)\n\n\ndef rotate(",
        "layer.mlp.gate_proj)\n\n\ndef rotate(",
        check_rotation,
    ),
    "a rotation that readers do not invert": (
        "linear.weight.data = linear.weight @ rotation.to(linear.weight)\n",
        "linear.weight.data = linear.weight @ rotation.to(linear.weight).T\n",
        check_rotation,
    ),
    "a rotation that writers do not follow": (
        "rotation.to(linear.weight).T @ linear.weight",
        "rotation.to(linear.weight) @ linear.weight",
        check_rotation,
    ),
    "a writer's bias left behind": (
        "linear.bias.data = linear.bias @ rotation.to(linear.bias)",
        "pass",
        check_rotation,
    ),
    "values turned and never turned back": (
        '((attention.v_proj, "out"), (attention.o_proj, "in"))',
        '((attention.v_proj, "out"),)',
        check_rotation,
    ),
    "values turned twice": ("linear.weight.data = (r.T @ heads)", "linear.weight.data = (r @ heads)", check_rotation),
    "a value's bias left behind": (
        "linear.bias.data = (linear.bias.view(-1, len(r)) @ r).flatten()",
        "pass",
        check_rotation,
    ),
    "online rotation without the weight's": (
        "compute = build(name, times_hadamard(w, factors))",
        "compute = build(name, w)",
        check_online,
    ),
    "online rotation that is not needed": ("compute(times_hadamard(x, factors))", "compute(x)", check_online),
    "online rotation of every layer": ('if not name.endswith("down_proj"):', "if False:", check_online),
    "the largest Paley matrix": (
        "    while base > 1 and base % 2 == 0:\n        base //= 2\n",
        "    while base > 1 and base % 2 == 0 and paley(base) is None:\n        base //= 2\n",
        check_hadamard,
    ),
    "a Hadamard matrix without its length": ("found / base**0.5", "found", check_hadamard),
    "a Paley core of the wrong sign": (
        "core[0, 1:], core[1:, 0] = 1.0, 2.0 - rest",
        "core[0, 1:], core[1:, 0] = 1.0, 1.0",
        check_hadamard,
    ),
    "factors in the wrong order": ("len(a), len(b)) @ b)", "len(b), len(a)).mT @ b)", check_hadamard),
    "queries are not rotated with keys": (
        "query, key = query @ rotation.to(query), key @ rotation.to(key)",
        "key = key @ rotation.to(key)",
        check_kv,
    ),
    "one scale for all of the cache": ("x.reshape(-1, x.shape[-1]), bits", "x.reshape(1, -1), bits", check_kv),
    "keys rounded by channel": (
        'fake_quantize(x.reshape(-1, x.shape[-1]), bits, -1, False, name="KV cache").view(x.shape)',
        'fake_quantize(x.mT.reshape(-1, x.shape[-2]), bits, -1, False, name="KV cache").view(x.mT.shape).mT',
        check_kv,
    ),
    "values are kept as they are": ("stored(key), stored(value)", "stored(key), value", check_kv),
    "attention stays quantized": ("        model.set_attn_implementation(before)\n", "        pass\n", check_kv),
    "Cayley uphill": (
        "(unit + direction / 2, (unit - direction / 2)",
        "(unit - direction / 2, (unit + direction / 2)",
        check_cayley,
    ),
    "a step that leaves the rotations": (
        "torch.linalg.solve(unit + direction / 2, (unit - direction / 2) @ rotation)",
        "(unit - direction) @ rotation",
        check_cayley,
    ),
    "a direction that is not skew": (
        "gradient @ rotation.T - rotation @ gradient.T",
        "gradient @ rotation.T",
        check_cayley,
    ),
    "rounding stops the gradient": (
        "(steps + (steps.round() - steps).detach()) * scale",
        "(steps.round() * scale).detach()",
        check_spin,
    ),
    "a scale without a gradient": (
        '    scale = absmax_scale(x, bits, "row")\n    steps',
        '    scale = absmax_scale(x, bits, "row").detach()\n    steps',
        check_spin,
    ),
    "the last rotation instead of the best": ("return best[1], losses", "return rotation, losses", check_spin),
    "weights in other coordinates": ("(w @ rotation).T", "w.T", check_spin),
    "a transposed group axis": (
        "(w / channel_scale).round().view(len(w), -1, size)",
        "(w / channel_scale).round().T.reshape(len(w), -1, size)",
        check_progressive,
    ),
    "a wrong zero-point": ("zero = (-low / group_scale)", "zero = (high / group_scale)", check_progressive),
    "a group that leaves zero out": (
        ".amin(dim=-1, keepdim=True).clamp(max=0)",
        ".amin(dim=-1, keepdim=True)",
        check_progressive,
    ),
    "a group scale of zero": (".round().clamp(min=1)\n    zero", ".round()\n    zero", check_progressive),
    "no protective range": ("top=119", "top=127", lambda nb: check_protection(nb)),
    "bytes that borrow": (
        "return ((a | high) - (b & ~high)) ^ ((a ^ ~b) & high)",
        "return (a - b) & 0xFFFFFFFF",
        check_packed,
    ),
    "a zero without its scale": ("zero * scale * 0x01010101", "zero * 0x01010101", check_packed),
    "codes packed the other way round": (
        "(8 * torch.arange(4, device=codes.device))",
        "(8 * torch.arange(4, device=codes.device).flip(0))",
        check_packed,
    ),
    "main-loop work counted for each weight": ("(3 + 2 + 2) // 8", "(3 + 8 + 8) // 8", check_tiles),
    "unpacking left out": ("(3 + 2 + 2) // 8", "(2 + 2) // 8", check_tiles),
    "16-bit weights counted one by one": ("(5 + 4 + 4) // 8", "(5 + 8 + 8) // 8", check_tiles),
    "a tile of groups that do not fit": (
        "size = check_settings(k, 4, group_size, kind)",
        "size = group_size",
        check_tiles,
    ),
    "a tile of an unknown kind": ("    if kind not in KINDS:\n", "    if False:\n", check_tiles),
    "partial sums counted once": (
        'count["in the main loop"] += 2 * m * n  # convert',
        'count["in the main loop"] = 2 * m * n  # convert',
        check_tiles,
    ),
    "groups that all use the first scale": (
        "w_scale = absmax_scale(w[:, part], 4",
        "w_scale = absmax_scale(w[:, :size], 4",
        check_tiles,
    ),
    "subnormal numbers rounded as normal ones": ("exponent.clamp(min=smallest)", "exponent", check_fp8),
    "a wrong bias of the exponent": ("smallest = 2 - 2 **", "smallest = 1 - 2 **", check_fp8),
    "too large becomes infinite": (
        "(x / step).round() * step).clamp(-largest, largest)",
        "(x / step).round() * step)",
        check_fp8,
    ),
    "blocks of a weight along one side only": ("(1, 3)", "(3,)", check_fp8),
    "one scale for all blocks": ("(-1, size)), (-1,)\n", "(-1, size)), tuple(range(x.dim() + 1))\n", check_fp8),
    "NaN goes through FP8": (
        "= parts.abs().amax(dim=dims, keepdim=True)\n    if not bool(torch.isfinite(largest).all()):",
        "= parts.abs().amax(dim=dims, keepdim=True)\n    if False:",
        check_fp8,
    ),
    "outputs that blocks do not divide": ("            if len(x) % size:\n", "            if False:\n", check_fp8),
    "an unknown FP8 format": ("    if kind not in FP8:\n", "    if False:\n", check_fp8),
    "a checkpoint's scales by tensor": (
        'scale = absmax_scale(value.float(), 8, "row", layer)',
        'scale = absmax_scale(value.float(), 8, "tensor", layer).expand(len(value), 1)',
        check_export,
    ),
    "a tied head written twice": (
        'if name == "lm_head.weight" and model.config.tie_word_embeddings:',
        "if False:",
        check_export,
    ),
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_broken_twin_goes_red(load_algorithms, twin):
    old, new, check = TWINS[twin]
    broken = (
        prepared(load_algorithms(NAME, (old, new))) if check is check_rotation else load_algorithms(NAME, (old, new))
    )
    with pytest.raises((*CAUGHT, BaseException)) as caught:
        check(broken)
    assert isinstance(caught.value, (*CAUGHT, pytest.fail.Exception)), caught.value


# -- exercises ----------------------------------------------------------------------------------------------------------
WRONG_EDITS = [
    (
        "11.1",
        "largest = x.abs().amax(dim=-1, keepdim=True)",
        "largest = x.abs().amax().expand(len(x), 1)",
        "of their token",
    ),
    ("11.1", "x.abs().amax(", "x.amax(", "scale"),
    ("11.1", "largest / 127, 1.0", "largest / 128, 1.0", "scale"),
    ("11.1", "largest / 127, 1.0", "largest / 127, 0.5", "all zero"),
    ("11.1", "torch.where(largest > 0, largest / 127, 1.0)", "largest / 127", "all zero"),
    ("11.1", ".round()", ".trunc()", "nearest"),
    ("11.1", ".to(torch.int8)", "", "int8"),
    ("11.1", ".to(torch.int8)", ".to(torch.int16)", "int8"),
    ("11.1", "keepdim=True", "keepdim=False", "of their token"),
    ("11.1", "torch.int8), scales", "torch.int8), 1 / scales", "scale"),
    ("11.1", "torch.int8), scales", "torch.int8), scales[:, 0]", "codes and scales"),
    ("11.1", "torch.int8), scales", "torch.int8)", "codes and scales"),
    ("11.2", "v_weight / s.flatten()[:, None]", "v_weight * s.flatten()[:, None]", "does not change"),
    ("11.2", "o_weight * columns", "o_weight / columns", "does not change"),
    ("11.2", "s[:, None].expand(-1, q_per_kv, -1).flatten()", "s.flatten().repeat(q_per_kv)", "does not change"),
    ("11.2", "x**alpha / w ** (1 - alpha)", "x ** (1 - alpha) / w**alpha", "scale is"),
    (
        "11.2",
        "x_absmax.view(n_kv_heads, -1, head_dim).amax(dim=1)",
        "x_absmax.view(n_kv_heads, -1, head_dim)[:, 0]",
        "scale is",
    ),
    (
        "11.2",
        "x_absmax.view(n_kv_heads, -1, head_dim).amax(dim=1)",
        "x_absmax.view(-1, n_kv_heads, head_dim).amax(dim=0)",
        "scale is",
    ),
    ("11.2", "o_weight.abs().amax(dim=0)", "o_weight.amax(dim=0).clamp_min(1e-6)", "scale is"),
    (
        "11.2",
        "torch.where((x > 0) & (w > 0), x**alpha / w ** (1 - alpha), 1.0)",
        "x**alpha / w ** (1 - alpha)",
        "finite",
    ),
    ("11.2", "return v_weight", "return v_weight, o_weight\n    return v_weight", "scale is"),
    ("11.3", "(w_in * g) @ rotation", "w_in @ rotation", "a trained norm"),
    ("11.3", "torch.ones_like(g)", "g", "a trained norm"),
    ("11.3", "(w_in * g) @ rotation", "(w_in @ rotation) * g", "a trained norm"),
    ("11.3", "(w_in * g) @ rotation", "(w_in * g) @ rotation.T", "a trained norm"),
    ("11.3", "rotation.T @ w_out", "rotation @ w_out", "a trained norm"),
    ("11.3", "torch.ones_like(g), (w_in * g)", "g.mean().expand(len(g)), (w_in * g / g.mean())", None),
    ("11.4", "return reach - 1", "return reach", "QServe"),
    ("11.4", "limit + 1\n", "119 + 1\n", "bits inside of"),
    ("11.4", "2**bits - 1", "15", "three bits"),
    ("11.4", "max(1, round((high - low) / codes))", "max(1, (high - low) // codes)", "inside of"),
    ("11.4", "min(back) < -limit - 1 or max(back) > limit", "max(map(abs, back)) > limit + 1", "QServe"),
    ("11.4", "max(-low, high))", "min(-low, high))", "QServe"),
    ("11.4", "round(v / scale)", "math.floor(v / scale + 0.5)", "ties"),
    ("11.5", "x_fit.abs().amax(dim=0), w", "x.abs().amax(dim=0), w", "smallest output error"),
    ("11.5", "((x_fit / s).abs()", "((x / s).abs()", "smallest output error"),
    ("11.5", "top_x**alpha / top_w ** (1 - alpha)", "top_x ** (1 - alpha) / top_w**alpha", "smallest output error"),
    ("11.5", "min(alphas", "max(alphas", "smallest output error"),
    ("11.5", "(w * s).abs().amax(dim=1, keepdim=True)", "(w * s).abs().amax()", "smallest output error"),
    ("11.5", "return min(alphas, key=error)", "return 0.5", "smallest output error"),
    ("11.5", "return min(alphas, key=error)", "return max(alphas)", "smallest output error"),
]


@pytest.mark.parametrize(("number", "old", "new", "words"), WRONG_EDITS)
def test_a_solution_made_wrong_fails_with_the_property_named(number, old, new, words):
    result = exercises.check(number, edited(NAME, number, (old, new)))
    if words is None:  # another right answer: a common factor may stay in the norm
        assert result.state == "pass", result
        return
    assert_names_what_broke(result, words)


NAMED_MISTAKES = [
    (
        "((x_fit / s).abs().amax() / 127)",
        "((x / s).abs().amax(dim=1, keepdim=True) / 127)",
        "a scale of its own for each token of x",
    ),
    (".clamp(-127, 127)", "", "inputs that are not clipped"),
    ("x_fit.abs().amax(dim=0), w", "x.abs().amax(dim=0), w", "smoothing scales from x"),
    ("((x_fit / s).abs()", "((x / s).abs()", "the input's scale from x"),
    (").norm())", ").abs().sum())", "the sum of absolute errors"),
    ("(w * s).abs().amax(dim=1, keepdim=True)", "(w * s).abs().amax()", "one scale for the whole weight"),
    ("min(alphas", "max(alphas", "the largest error"),
]


@pytest.mark.parametrize(("old", "new", "mistake"), NAMED_MISTAKES)
def test_a_known_mistake_with_alpha_is_named(old, new, mistake):
    result = exercises.check("11.5", edited(NAME, "11.5", (old, new)))
    assert_names_what_broke(result, "smallest output error")
    assert result.message.endswith(f"(as with {mistake})"), result.message


def test_an_unknown_mistake_with_alpha_is_not_guessed():
    result = exercises.check("11.5", edited(NAME, "11.5", ("return min(alphas, key=error)", "return 0.5")))
    assert_names_what_broke(result, "smallest output error")
    assert "as with" not in result.message
    squared = exercises.check("11.5", edited(NAME, "11.5", (").norm())", ").square().mean())")))
    assert squared.state == "pass", squared


RIGHT_EDITS = [
    ("11.1", ".to(torch.int8), scales", ".to(torch.int8).numpy(), scales.numpy()"),
    ("11.1", "return (x / scales)", "return [(x / scales)", "torch.int8), scales", "torch.int8), scales]"),
    ("11.1", ".clamp(-127, 127)", ""),
    ("11.1", "torch.where(largest > 0, largest / 127, 1.0)", "(largest / 127).masked_fill(largest == 0, 1)"),
    (
        "11.2",
        "return v_weight / s.flatten()[:, None], o_weight * columns",
        "v_weight /= s.flatten()[:, None]\n    o_weight *= columns\n    return v_weight, o_weight",
    ),
    ("11.2", "return v_weight", "v_weight, o_weight = v_weight.double(), o_weight.double()\n    return v_weight"),
    ("11.2", "s[:, None].expand(-1, q_per_kv, -1).flatten()", "s.repeat_interleave(q_per_kv, dim=0).flatten()"),
    ("11.3", "(w_in * g) @ rotation", "w_in @ (g[:, None] * rotation)"),
    ("11.3", "rotation.T @ w_out", "(w_out.T @ rotation).T"),
    ("11.4", "return reach - 1", "return np.int64(reach - 1)"),
    ("11.4", "return reach - 1", "return float(reach - 1)"),
    ("11.5", "return min(alphas, key=error)", "return alphas[int(np.argmin([error(a) for a in alphas]))]"),
    ("11.5", "return min(alphas, key=error)", "return torch.tensor(min(alphas, key=error), dtype=torch.float64)"),
    (
        "11.5",
        "x_fit.abs().amax(dim=0), w.abs().amax(dim=0)",
        "(x_fit**2).amax(dim=0).sqrt(), (w**2).amax(dim=0).sqrt()",
    ),
]


@pytest.mark.parametrize("case", RIGHT_EDITS)
def test_a_right_answer_in_another_dress_passes(case):
    number, *edits = case
    result = exercises.check(number, edited(NAME, number, *zip(edits[::2], edits[1::2], strict=True)))
    assert result.state == "pass", result


def test_the_buggy_rotation_is_right_for_fresh_norms_only():
    """What exercise 11.3 says is true: a norm of ones hides the bug."""
    buggy = notebook_cells.answers(NAME, "exercise")["buggy_rotate_block"]
    mended = notebook_cells.answers(NAME, "solution")["mended_rotate_block"]
    r, w_in, w_out = torch.linalg.qr(normal(8, 8))[0], normal(12, 8, seed=1), normal(8, 12, seed=2)
    for g, hidden in ((torch.ones(8).double(), True), (torch.rand(8).double() + 0.5, False)):
        same = all(
            torch.allclose(a, b) for a, b in zip(buggy(g, w_in, w_out, r), mended(g, w_in, w_out, r), strict=True)
        )
        assert same == hidden
