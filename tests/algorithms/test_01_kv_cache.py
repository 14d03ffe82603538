"""Notebook 01's algorithms hold, their broken twins are caught, and its exercises tell right answers from wrong ones."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import notebook_cells
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook_cells import checked_functions
from transformers import AutoModelForCausalLM, DeepseekV2Config, LlamaConfig, Qwen2Config

from helpers import exercises, models
from helpers.kv_adapter import cache_bytes, new_cache
from helpers.memory import run_limited, tensor_bytes

NAME = "01_kv_cache"
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=60, num_attention_heads=4)
CONFIGS = {
    "MHA": LlamaConfig(**SIZES, num_key_value_heads=4),
    "GQA": LlamaConfig(**SIZES, num_key_value_heads=2),
    "MQA": LlamaConfig(**SIZES, num_key_value_heads=1),
    "explicit head_dim": LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=12),
    "untied head, other theta": LlamaConfig(
        **SIZES,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "biases": Qwen2Config(**SIZES, num_key_value_heads=2),
}
MLA = DeepseekV2Config(
    **SIZES,
    kv_lora_rank=12,
    qk_rope_head_dim=8,
    qk_nope_head_dim=6,
    v_head_dim=10,
    q_lora_rank=None,
    n_routed_experts=2,
    moe_intermediate_size=16,
    first_k_dense_replace=2,
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def nb(load_algorithms):
    return load_algorithms(NAME)


def tiny(config):
    """A random model whose every weight and bias is far from zero, so that no term can be left out unseen."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


# -- what must hold -----------------------------------------------------------------------------------------------------
def check_logits(nb: SimpleNamespace, config) -> None:
    model = tiny(config)
    ids = torch.randint(0, 60, (11,))
    ours = nb.forward(nb.Llama(model.state_dict(), config), ids)
    assert torch.allclose(ours, model(ids[None]).logits[0], atol=1e-5)


def check_cached_decoding(nb: SimpleNamespace, config, n_prefill: int, n_steps: int, cache=None) -> None:
    """Prefill, then one by one: the logits, the counted tokens and the bytes."""
    llama = nb.Llama(tiny(config).state_dict(), config)
    ids = torch.randint(0, 60, (n_prefill + n_steps,))
    expected = nb.forward(llama, ids)
    cache = cache if cache is not None else nb.CatCache(llama.n_layers)
    llama.projected_tokens = 0
    rows = [nb.forward(llama, ids[:n_prefill], cache)] if n_prefill else []
    rows += [row[None] for row in nb.decode_with_cache(llama, ids[n_prefill:], cache)]
    assert torch.allclose(torch.cat(rows), expected, atol=1e-5)
    assert llama.projected_tokens == len(ids) == cache.n_tokens
    assert tensor_bytes(cache.tensors()) == models.kv_bytes(config, len(ids), 1, "float32")


def check_mla(nb: SimpleNamespace) -> None:
    """Naive equals Transformers, absorbed equals naive, decoding from the latents equals the full pass, bytes as by formula."""
    n = 9
    toy = tiny(MLA).model
    attention, x, positions = toy.layers[1].self_attn, torch.randn(n, 32), torch.arange(n)
    mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
    rope = toy.rotary_emb(x[None], position_ids=positions[None])
    reference = attention(x[None], attention_mask=mask, position_embeddings=rope)[0][0]
    w = nb.read_mla(attention)
    latents, rotary = nb.mla_latents(w, x, positions)
    for form in (nb.mla_naive, nb.mla_absorbed):
        assert torch.allclose(form(w, x, positions, latents, rotary), reference, atol=1e-5)
        assert torch.allclose(form(w, x[-2:], positions[-2:], latents, rotary), reference[-2:], atol=1e-5)
    assert MLA.num_hidden_layers * tensor_bytes([latents, rotary]) == models.kv_bytes(MLA, n, 1, "float32")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_forward_pass_is_transformers_own(nb, name):
    check_logits(nb, CONFIGS[name])


@settings(max_examples=12, deadline=None)
@given(name=st.sampled_from(sorted(CONFIGS)), n_prefill=st.integers(0, 9), n_steps=st.integers(1, 6))
def test_cached_decoding_equals_one_full_pass(nb, name, n_prefill, n_steps):
    with torch.no_grad():
        check_cached_decoding(nb, CONFIGS[name], n_prefill, n_steps)


def test_the_preallocated_cache_is_the_same_cache_and_refuses_one_token_too_many(nb):
    config = CONFIGS["GQA"]
    cache = nb.PreallocatedCache(2, 2, 8, max_tokens=9)
    check_cached_decoding(nb, config, 5, 4, cache)
    assert cache.copied_tokens == 0
    with pytest.raises(ValueError, match="10 tokens do not fit into a cache of 9"):
        cache.append(0, torch.zeros(2, 1, 8), torch.zeros(2, 1, 8))


@settings(max_examples=10, deadline=None)
@given(n=st.integers(1, 24))
def test_projected_and_copied_tokens_are_counted(nb, n):
    config = CONFIGS["MQA"]
    llama = nb.Llama(models_state(config), config)
    ids = torch.arange(n) % 60
    with torch.no_grad():
        naive = torch.stack(list(nb.decode_without_cache(llama, ids)))
        assert llama.projected_tokens == n * (n + 1) // 2
        cache = nb.CatCache(2)
        assert torch.allclose(naive, torch.stack(list(nb.decode_with_cache(llama, ids, cache))), atol=1e-5)
    assert cache.copied_tokens == nb.growth_cost("concatenated", n, 99)["copied"] == n * (n - 1) // 2


_states: dict[int, dict] = {}


def models_state(config):
    return _states.setdefault(id(config), tiny(config).state_dict())


def test_growth_costs_are_bounded(nb):
    for n in (1, 15, 16, 17, 100):
        blocks = nb.growth_cost("in blocks", n, 128, block_size=16)
        assert blocks["copied"] == 0 and 0 <= blocks["held by a layer at most"] - n < 16
        assert nb.growth_cost("preallocated", n, 128) == {"copied": 0, "held by a layer at most": 128}


def test_mla(nb):
    check_mla(nb)


def test_float64_shows_that_only_rounding_differs(nb, bundled_model):
    """On the real model: logits within 1e-4 of Transformers', cached within 1e-5 of the largest logit of uncached."""
    model = models.load_model(str(bundled_model))
    llama, ids = nb.Llama(model.state_dict(), model.config), torch.arange(500, 510)
    full = nb.forward(llama, ids)
    assert (full - model(ids[None]).logits[0]).abs().max() <= 1e-4
    cached = torch.stack(list(nb.decode_with_cache(llama, ids, nb.CatCache(llama.n_layers))))
    assert (full - cached).abs().max() <= 1e-5 * full.abs().max()
    double = {
        k: v.double() for k, v in llama.weights.items() if not k.startswith("model.layers.") or int(k.split(".")[2]) < 2
    }
    llama.weights, llama.n_layers = double, 2
    exact = torch.stack(list(nb.decode_with_cache(llama, ids, nb.CatCache(2))))
    assert (nb.forward(llama, ids) - exact).abs().max() <= 1e-9


# -- broken twins -------------------------------------------------------------------------------------------------------
MUTATIONS = {
    "a cached position off by one": (
        "torch.arange(n_cached, n_cached + len(ids)",
        "torch.arange(n_cached + 1, n_cached + 1 + len(ids)",
    ),
    "positions that forget the cache": ("n_cached = 0 if cache is None else cache.n_tokens", "n_cached = 0"),
    "a cache that forgets the newest token": (
        "self.keys[layer], self.values[layer] = k, v\n",
        "self.keys[layer], self.values[layer] = k[:, :-1] if k.shape[1] > 1 else k, v[:, :-1] if v.shape[1] > 1 else v\n",
    ),
    "keys and values exchanged in the cache": (
        "self.keys[layer], self.values[layer] = k, v\n",
        "self.keys[layer], self.values[layer] = v, k\n",
    ),
    "a token that cannot see itself": (
        "key_positions[None, :] > query_positions[:, None]",
        "key_positions[None, :] >= query_positions[:, None] + (query_positions[:, None] == 0)",
    ),
    "query heads paired with the wrong KV head": (
        "k = k.repeat_interleave(q_per_kv, dim=0)",
        "k = k.repeat(q_per_kv, 1, 1)",
    ),
    "a missing square root": ("k.transpose(1, 2) / head_dim**0.5", "k.transpose(1, 2) / head_dim"),
    "a wrong sign in RoPE": ("torch.cat([-second, first], dim=-1) * sin", "torch.cat([second, first], dim=-1) * sin"),
    "a projected token not counted": ("llama.projected_tokens += len(ids)", "llama.projected_tokens += len(ids) - 1"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_decoder_is_caught(load_algorithms, name):
    twin = load_algorithms(NAME, MUTATIONS[name])
    with pytest.raises((AssertionError, RuntimeError)):
        check_logits(twin, CONFIGS["GQA"])
        check_cached_decoding(twin, CONFIGS["GQA"], 6, 3)


MLA_MUTATIONS = {
    "rotary scores left out": ("q_latent @ latents.T + q_rope @ rotary.T", "q_latent @ latents.T"),
    "rotary rows not reordered": ("q[:, nope:][:, halves]", "q[:, nope:]"),
    "latents not normalized": ('rms_norm(x @ w["down"].T, w["norm"], w["eps"])', 'x @ w["down"].T'),
    "values absorbed with the keys' matrix": ('"hnr,her->hne", mixed, w["up_v"]', '"hnr,her->hne", mixed, w["up_k"]'),
    "the scale left out": ('(scores * w["scale"])', "scores"),
    "a second copy of the rotary key": (
        'apply_rope(x @ w["k_rope"].T, cos, sin)',
        'apply_rope(x @ w["k_rope"].T, cos, sin).repeat(1, 2)',
    ),
}


@pytest.mark.parametrize("name", MLA_MUTATIONS)
def test_a_broken_mla_is_caught(load_algorithms, name):
    twin = load_algorithms(NAME, MLA_MUTATIONS[name])
    with pytest.raises((AssertionError, RuntimeError)):
        check_mla(twin)


def test_a_preallocated_cache_that_overwrites_its_newest_token_is_caught(load_algorithms):
    twin = load_algorithms(
        NAME, ("buffer[layer, :, start:end] = new", "buffer[layer, :, max(0, start - 1) : end - (start > 0)] = new")
    )
    with pytest.raises((AssertionError, RuntimeError)):
        check_cached_decoding(twin, CONFIGS["GQA"], 5, 4, twin.PreallocatedCache(2, 2, 8, max_tokens=9))


# -- bytes: a wrong formula is caught -------------------------------------------------------------------------------------
def allocated(config, n_tokens=7, batch=2) -> int:
    held = new_cache("dynamic", config)
    tiny(config)(torch.ones(batch, n_tokens, dtype=torch.long), past_key_values=held)
    return cache_bytes(held)


def check_bytes() -> None:
    for config in (*CONFIGS.values(), MLA):
        assert allocated(config) == models.kv_bytes(config, 7, 2, "float32")


def test_bytes_by_formula_are_bytes_allocated():
    check_bytes()


def _with_all_heads(config):
    shape = SOUND(config)
    return shape.model_copy(update={"elements_per_layer": (2 * shape.n_q_heads * shape.head_dim,) * shape.n_layers})


def _with_hidden_over_heads(config):
    shape = SOUND(config)
    wide = 2 * shape.n_kv_heads * config.hidden_size // config.num_attention_heads
    return shape if shape.kind == "MLA" else shape.model_copy(update={"elements_per_layer": (wide,) * shape.n_layers})


def _without_the_rotary_part(config):
    shape = SOUND(config)
    if shape.kind != "MLA":
        return shape
    return shape.model_copy(update={"elements_per_layer": (config.kv_lora_rank,) * shape.n_layers})


SOUND = models.kv_shape


@pytest.mark.parametrize("mutant", [_with_all_heads, _with_hidden_over_heads, _without_the_rotary_part])
def test_a_wrong_cache_shape_turns_the_equality_red(monkeypatch, mutant):
    """The wrong GQA factor, a derived head_dim, and MLA counted without its rotary key."""
    monkeypatch.setattr(models, "kv_shape", mutant)
    with pytest.raises(AssertionError):
        check_bytes()


def test_the_out_of_memory_boundary_is_where_the_formula_says():
    """With half a sequence to spare, the predicted batch fits and one more does not."""
    code = (
        "import re, torch\n"
        "size = (arguments['batch'], *arguments['size'])\n"
        "held = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(arguments['n'])]\n"
        "result = 1024 * int(re.search(r'VmData:\\s+(\\d+) kB', open('/proc/self/status').read()).group(1))\n"
    )
    shape = models.kv_shape(
        LlamaConfig(num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    )
    size, one = (shape.n_kv_heads, 1000, shape.head_dim), models.kv_bytes(shape, 1000)
    baseline = run_limited(code, 2**33, batch=0, size=size, n=60).value
    limit = baseline + 4 * one + one // 2
    outcomes = [run_limited(code, limit, batch=b, size=size, n=2 * shape.n_layers).outcome for b in (4, 5)]
    assert outcomes == ["ok", "out of memory"]


# -- exercises ----------------------------------------------------------------------------------------------------------
answers = partial(notebook_cells.answers, NAME)


FUNCTIONS = checked_functions(NAME)


def _all_heads(c, n, w):
    d = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    return 2 * c["num_hidden_layers"] * c["num_attention_heads"] * d * min(n, c.get("sliding_window") or n) * w


def _hidden_size(c, n, w):
    return 2 * c["num_hidden_layers"] * c["hidden_size"] * n * w


def _keys_only(c, n, w):
    return answers("solution")["my_kv_bytes"](c, n, w) // 2


def _no_window(c, n, w):
    return answers("solution")["my_kv_bytes"]({**c, "sliding_window": None}, n, w)


def _attends_before_appending(q, k, v, ck, cv):
    weights = (ck @ q / len(q) ** 0.5).softmax(dim=0)
    return weights @ cv, torch.cat([ck, k[None]]), torch.cat([cv, v[None]])


def _no_root(q, k, v, ck, cv):
    nk, nv = torch.cat([ck, k[None]]), torch.cat([cv, v[None]])
    return (nk @ q).softmax(dim=0) @ nv, nk, nv


def _newest_first(q, k, v, ck, cv):
    nk, nv = torch.cat([k[None], ck]), torch.cat([v[None], cv])
    return (nk @ q / len(q) ** 0.5).softmax(dim=0) @ nv, nk, nv


def _one_buggy(*arguments, **options):
    return answers("exercise")["buggy_rope_step"](*arguments, **options)


def _rotates_values(q, k, v, ck, cv, theta=1e4):
    scope = answers("solution")
    cos, sin = scope["rope_tables"](torch.tensor([len(ck)]), len(q), theta)
    return scope["mended_rope_step"](q, k, scope["apply_rope"](v[None], cos, sin)[0], ck, cv, theta)


def _position_always_zero(q, k, v, ck, cv, theta=1e4):
    return answers("solution")["cached_step"](q, k, v, ck, cv)


def _no_blocks(budget, weights, workspace_per_sequence, bytes_per_token, n_tokens, block_size):
    return max(0, (budget - weights) // (n_tokens * bytes_per_token + workspace_per_sequence))


def _goes_negative(budget, weights, workspace_per_sequence, bytes_per_token, n_tokens, block_size):
    return (budget - weights) // (-(-n_tokens // block_size) * block_size * bytes_per_token + workspace_per_sequence)


def _no_workspace(budget, weights, workspace_per_sequence, bytes_per_token, n_tokens, block_size):
    return max(0, (budget - weights) // (-(-n_tokens // block_size) * block_size * bytes_per_token))


def _smallest(options, n_tokens, budget, max_kl):
    good = [o for o in options if o["kl"] <= max_kl and o["bytes_per_token"] * n_tokens <= budget]
    return min(good, key=lambda o: o["bytes_per_token"])["name"] if good else "none"


def _ignores_kl(options, n_tokens, budget, max_kl):
    return answers("solution")["choose_cache"](options, n_tokens, budget, float("inf"))


def _ignores_residual(options, n_tokens, budget, max_kl):
    flat = [{**o, "residual_tokens": 0} for o in options]
    return answers("solution")["choose_cache"](flat, n_tokens, budget, max_kl)


def _fails_when_nothing_fits(options, n_tokens, budget, max_kl):
    name = answers("solution")["choose_cache"](options, n_tokens, budget, max_kl)
    return min([o for o in options if o["name"] == name], key=lambda o: o["kl"])["name"]


def _tied(key):
    """The right choice, but among equally fast caches the one with the least `key`."""

    def choose(options, n_tokens, budget, max_kl):
        good = [o for o in options if _size(o, n_tokens) <= budget and o["kl"] <= max_kl]
        return min(good, key=lambda o: (o["step_seconds"], key(o)))["name"] if good else "none"

    return choose


def _size(option, n_tokens):
    newest = min(n_tokens, option["residual_tokens"])
    return newest * option["residual_bytes_per_token"] + (n_tokens - newest) * option["bytes_per_token"]


_ties_by_bytes_per_token = _tied(lambda o: o["bytes_per_token"])
_ties_by_highest_kl = _tied(lambda o: -o["kl"])
_ties_by_lowest_kl = _tied(lambda o: o["kl"])


def _residual_of_32(options, n_tokens, budget, max_kl):
    fixed = [{**o, "residual_tokens": min(32, o["residual_tokens"])} for o in options]
    return answers("solution")["choose_cache"](fixed, n_tokens, budget, max_kl)


def _residual_of_100_bytes(options, n_tokens, budget, max_kl):
    fixed = [{**o, "residual_bytes_per_token": 100} for o in options]
    return answers("solution")["choose_cache"](fixed, n_tokens, budget, max_kl)


def _none_not_text(*arguments):
    name = answers("solution")["choose_cache"](*arguments)
    return "None" if name == "none" else name


def _text(*arguments):
    return str(answers("solution")["my_kv_bytes"](*arguments))


def _changes_its_input(q, k, v, ck, cv):
    result = answers("solution")["cached_step"](q, k, v, ck, cv)
    q *= 2
    return result


def _two_results(q, k, v, ck, cv):
    return answers("solution")["cached_step"](q, k, v, ck, cv)[:2]


def _a_word_among_results(q, k, v, ck, cv, theta=1e4):
    return *answers("solution")["mended_rope_step"](q, k, v, ck, cv, theta)[:2], "values"


WRONG = [
    ("01.1", _all_heads, "only KV heads are stored"),
    ("01.1", _hidden_size, "only KV heads are stored"),
    ("01.1", _keys_only, "a key and a value"),
    ("01.1", _no_window, "sliding window"),
    ("01.2", _attends_before_appending, "equals full causal attention"),
    ("01.2", _no_root, "equals full causal attention"),
    ("01.2", _newest_first, "the cache holds all keys"),
    ("01.3", _one_buggy, "rotated by its own position"),
    ("01.3", _rotates_values, "output equals full attention"),
    ("01.3", _position_always_zero, "output equals full attention"),
    ("01.4", _no_blocks, "the next larger one does not"),
    ("01.4", _goes_negative, "the batch is 0"),
    ("01.4", _no_workspace, "the next larger one does not"),
    ("01.5", _smallest, "the fastest"),
    ("01.5", _ignores_kl, "KL bound"),
    ("01.5", _ignores_residual, "full precision"),
    ("01.5", _fails_when_nothing_fits, "none"),
    ("01.1", _text, "got:      '10240'"),
    ("01.2", _changes_its_input, "the inputs are not changed"),
    ("01.2", _two_results, "got:      a tuple of 2: (Tensor, Tensor)"),
    ("01.2", lambda q, *_: q, "got:      one Tensor"),
    ("01.3", _a_word_among_results, "got:      a tuple of 3: (Tensor, Tensor, str)"),
    ("01.5", _ties_by_bytes_per_token, "the smaller in all"),
    ("01.5", _ties_by_highest_kl, "the smaller in all"),
    ("01.5", _ties_by_lowest_kl, "of equally fast caches the smaller"),
    ("01.5", _residual_of_32, "its own residual window"),
    ("01.5", _residual_of_100_bytes, "residual_bytes_per_token"),
    ("01.5", _none_not_text, "got:      'None'"),
]


@pytest.mark.parametrize(("number", "answer", "words"), WRONG, ids=[f"{n} {f.__name__}" for n, f, _ in WRONG])
def test_typical_wrong_answers_fail_with_the_property_named(number, answer, words):
    result = exercises.check(number, answer)
    assert result.state == "fail" and words in result.message, result.message


@pytest.mark.parametrize("number", FUNCTIONS)
def test_none_for_some_inputs_only_is_a_failure(number):
    right, calls = answers("solution")[FUNCTIONS[number]], iter(range(10**6))
    result = exercises.check(number, lambda *given: right(*given) if next(calls) < 2 else None)
    assert result.state == "fail"
    assert "input: " in result.message and "None" in result.message


@pytest.mark.parametrize("number", FUNCTIONS)
def test_an_error_in_an_answer_shows_its_input(number):
    def broken(*_):
        raise KeyError("window")

    result = exercises.check(number, broken)
    shown = {
        "01.1": "n_tokens=10",
        "01.2": "token 0 of 1",
        "01.3": "position 0",
        "01.4": "'budget': 0",
        "01.5": "budget=",
    }
    assert result.state == "fail"
    assert "KeyError: 'window'" in result.message and shown[number] in result.message


def _in_numpy(q, k, v, ck, cv):
    q, k, v, ck, cv = (x.numpy() for x in (q, k, v, ck, cv))
    nk, nv = np.concatenate([ck, k[None]]), np.concatenate([cv, v[None]])
    weights = np.exp(nk @ q / len(q) ** 0.5)
    return weights / weights.sum() @ nv, nk, nv


def _in_lists(*arguments):
    return [t.tolist() for t in answers("solution")["cached_step"](*arguments)]


def _in_lists_of_rows(*arguments):
    output, k, v = answers("solution")["cached_step"](*arguments)
    return output, list(k), list(v)


def _rope_in_numpy(*arguments):
    return tuple(t.double().numpy() for t in answers("solution")["mended_rope_step"](*arguments))


def _renamed(limit, model, extra, each, length, size):
    return answers("solution")["largest_batch"](limit, model, extra, each, length, size)


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("01.2", _in_numpy),
        ("01.2", _in_lists),
        ("01.2", _in_lists_of_rows),
        ("01.3", _rope_in_numpy),
        ("01.4", _renamed),
    ],
)
def test_right_answers_of_another_form_pass(number, answer):
    result = exercises.check(number, answer)
    assert result.state == "pass", result.message


def test_the_buggy_step_is_invisible_from_an_empty_cache_and_visible_after_a_prefill():
    """What exercise 01.3 says of the author's test is true."""
    scope = answers("exercise")
    reference = answers("solution")["mended_rope_step"]
    q, k, v = (torch.randn(6, 8) for _ in range(3))
    for start, visible in ((0, False), (3, True)):
        k0 = k[:0]
        v0 = v[:0]
        for t in range(start):
            _, k0, v0 = reference(q[t], k[t], v[t], k0, v0)
        pairs = [(k0, v0), (k0, v0)]
        worst = 0.0
        for t in range(start, 6):
            good, *pairs[0] = reference(q[t], k[t], v[t], *pairs[0])
            bad, *pairs[1] = scope["buggy_rope_step"](q[t], k[t], v[t], *pairs[1])
            worst = max(worst, float((good - bad).abs().max()))
        assert (worst > 1e-3) is visible
