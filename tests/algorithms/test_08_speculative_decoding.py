"""Notebook 08: speculation changes no distribution and no greedy token, broken twins are caught, and so are wrong answers."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import math
import random
from collections import Counter
from functools import cache, partial
from pathlib import Path

import notebook_cells
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook_cells import assert_names_what_broke, checked_functions
from scipy.stats import binomtest, chi2
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.generation import (
    LogitsProcessorList,
    PromptLookupCandidateGenerator,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from helpers import exercises, kv_adapter

NAME = "08_speculative_decoding"
CAUGHT = (AssertionError, LookupError, ValueError, TypeError, RuntimeError)
RARE = 1e-5
"""A sound algorithm's figures may be this improbable, no more. Seeds are fixed, so a sound algorithm passes every time."""
VOCAB = 64
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def nb(load_algorithms):
    return load_algorithms(NAME)


def quick(n: int = 60):
    return settings(max_examples=n, deadline=None, database=None, derandomize=True, report_multiple_bugs=False)


def rng_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_probs(seed: int, *shape: int, sharp: float = 1.5) -> torch.Tensor:
    return (torch.randn(*shape, generator=rng_of(seed), dtype=torch.float64) * sharp).softmax(dim=-1)


def assert_sample_of(counts: Counter, probs: dict, what: object = "") -> None:
    """Counts against probabilities: nothing impossible, and a chi-square p value above `RARE` (cells under 5 are joined)."""
    n = sum(counts.values())
    impossible = [key for key in counts if probs.get(key, 0.0) <= 0]
    assert not impossible, f"{what}: cannot be drawn: {impossible[:3]}"
    due = {key: n * prob for key, prob in probs.items() if prob > 0}
    cells = [(counts[key], expected) for key, expected in due.items() if expected >= 5]
    rest = [(counts[key], expected) for key, expected in due.items() if expected < 5]
    if rest:
        seen, expected = map(sum, zip(*rest, strict=True))
        cells.append((seen, max(expected, 1.0)))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    value = float(chi2.sf(statistic, max(len(cells) - 1, 1)))
    assert value > RARE, f"{what}: p={value:.1e}, {[(s, round(e)) for s, e in cells][:12]}"


def assert_rate(good: int, n: int, rate: float, what: object = "") -> None:
    value = binomtest(good, n, min(max(rate, 0.0), 1.0)).pvalue
    assert value > RARE, f"{what}: {good} of {n}, where {rate:.4f} is due (p={value:.1e})"


# -- one token ---------------------------------------------------------------------------------------
def check_warp(nb):
    """The same as Transformers' own warpers in its own order: temperature, top-k, top-p."""
    generator = rng_of(1)
    for temperature, top_k, top_p in itertools.product((0.3, 1.0, 1.7), (0, 1, 5, 12, 99), (1.0, 0.9, 0.5, 0.05)):
        logits = torch.randn(6, 12, generator=generator) * 2
        chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        chain.extend([TopKLogitsWarper(top_k)] if top_k else [])
        chain.extend([TopPLogitsWarper(top_p)] if top_p < 1 else [])
        expected = chain(None, logits).softmax(dim=-1)
        got = nb.warp(logits.clone(), temperature, top_k, top_p)
        assert got.dtype == torch.float32
        assert torch.equal(got > 0, expected > 0), (temperature, top_k, top_p)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(nb.warp(logits[3], temperature, top_k, top_p), got[3])
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 0.0, 0.0, 0.0]])
    for top_k, top_p in ((0, 1.0), (2, 0.5)):
        assert nb.warp(logits, 0, top_k, top_p).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]], "greedy: the first largest"
    assert nb.warp(logits.double()).dtype == torch.float64 and nb.warp(logits.bfloat16()).dtype == torch.float32
    torch.testing.assert_close(nb.warp(logits), logits.softmax(-1))


def test_warp_equals_transformers(nb):
    check_warp(nb)


def check_draw(nb):
    for seed in range(40):
        probs = random_probs(seed, 9)
        probs[seed % 9] = 0.0
        probs /= probs.sum()
        u = float(torch.rand((), generator=rng_of(seed), dtype=torch.float64))
        expected = next(i for i, total in enumerate(itertools.accumulate(probs.tolist())) if total > u)
        assert nb.draw(probs, rng_of(seed)) == expected, (
            "the inverse of the cumulative distribution, at one uniform number"
        )
    probs = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    generator = rng_of(2)
    assert_sample_of(Counter(nb.draw(probs, generator) for _ in range(20_000)), dict(enumerate(probs.tolist())))


def test_a_draw_follows_its_distribution(nb):
    check_draw(nb)


distributions = st.lists(st.integers(0, 6), min_size=2, max_size=8).filter(any)


def check_residual(nb):
    @quick(120)
    @given(distributions, st.randoms(use_true_random=False))
    def holds(weights, rng):
        other = [rng.randint(0, 6) for _ in weights]
        other = other if any(other) else [1] * len(weights)
        p, q = (torch.tensor(w, dtype=torch.float64) / sum(w) for w in (weights, other))
        left = nb.residual(p, q)
        assert float(left.sum()) == pytest.approx(1) and bool((left >= 0).all())
        common = torch.minimum(p, q)
        torch.testing.assert_close(common + (1 - common.sum()) * left, p, atol=1e-12, rtol=0)
        assert torch.equal(nb.residual(p, p), p)

    holds()
    assert nb.residual(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])).tolist() == [0, 1], "greedy, agreed"
    assert nb.residual(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0])).tolist() == [1, 0]


def test_acceptance_and_residual_make_up_the_target(nb):
    check_residual(nb)


def check_verify(nb, n: int = 6000):
    """Fixed rows p and q, so that rounds can be counted: each position's tokens given that it was reached, and its rate."""
    for seed, gamma, size in ((3, 1, 5), (4, 2, 4), (5, 4, 3)):
        p, q = random_probs(seed, gamma + 1, size, sharp=0.8), random_probs(seed + 50, gamma, size, sharp=0.8)
        generator = rng_of(seed)
        drafts = torch.stack([torch.multinomial(row, n, replacement=True, generator=generator) for row in q]).T.tolist()
        seen = [Counter() for _ in range(gamma + 1)]
        for drafted in drafts:
            emitted = nb.verify(p, q, list(drafted), generator)
            assert 1 <= len(emitted) <= gamma + 1, "accepted drafts, and one more token"
            assert emitted[:-1] == drafted[: len(emitted) - 1], "what comes before the last token was drafted"
            for position, token in enumerate(emitted):
                seen[position][token] += 1
        for position, counts in enumerate(seen):
            assert_sample_of(counts, dict(enumerate(p[position].tolist())), f"gamma {gamma}, position {position}")
            if position < gamma:
                rate = float(torch.minimum(p[position], q[position]).sum())
                assert_rate(sum(seen[position + 1].values()), sum(counts.values()), rate, "sum(min(p, q))")


def check_verify_greedy(nb):
    """One-hot p and q: accepted while equal, then the target's own token; whatever the generator says."""
    rng = random.Random(6)
    for seed in range(60):
        gamma = rng.randint(0, 5)
        best = [rng.randrange(3) for _ in range(gamma + 1)]
        drafted = [rng.randrange(3) for _ in range(gamma)]
        p, q = (torch.nn.functional.one_hot(torch.tensor(ids, dtype=torch.long), 3).float() for ids in (best, drafted))
        n = next((i for i in range(gamma) if drafted[i] != best[i]), gamma)
        assert nb.verify(p, q, drafted, rng_of(seed)) == best[: n + 1]


def test_a_round_keeps_the_targets_distribution(nb):
    check_verify(nb)
    check_verify_greedy(nb)


def check_first_tokens(nb):
    n = 250_000
    for seed, size in ((7, 3), (8, 40)):
        p, q = random_probs(seed, size), random_probs(seed + 20, size)
        tokens, accepted = nb.first_tokens(p, q, n, rng_of(seed))
        counts = Counter(tokens.tolist())
        assert_sample_of(counts, dict(enumerate(p.tolist())), f"{n} draws of {size} tokens")
        assert_rate(int(accepted.sum()), n, float(torch.minimum(p, q).sum()), "sum(min(p, q))")
        shares = torch.bincount(tokens, minlength=size) / n
        assert 0.5 * float((shares - p).abs().sum()) < 2 * math.sqrt(size / n), "total variation"


def test_a_quarter_of_a_million_first_tokens(nb):
    check_first_tokens(nb)
    p, q = random_probs(7, 3), random_probs(27, 3)
    wrong, _ = nb.first_tokens(p, q, 250_000, rng_of(7), after_rejection=lambda p, q: p)
    with pytest.raises(AssertionError, match="p="):
        assert_sample_of(Counter(wrong.tolist()), dict(enumerate(p.tolist())))


# -- a model that takes words back -------------------------------------------------------------------------------------
@cache
def tiny(seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.float32, vocab: int = VOCAB):
    """A random Llama whose next token really depends on its context."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, vocab_size=vocab, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


@cache
def noisy(of: int = 0, noise: float = 0.03, dtype: torch.dtype = torch.float32, vocab: int = VOCAB):
    """A draft for `tiny(of)`: the same weights with some noise, so that it is right now and then."""
    model = AutoModelForCausalLM.from_config(tiny(of, 2, dtype, vocab).config, dtype=dtype).eval().requires_grad_(False)
    model.load_state_dict(tiny(of, 2, dtype, vocab).state_dict())
    generator = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * noise)
    return model


def some_ids(seed: int, n: int, vocab: int = VOCAB) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(n)]


def logits_of(model, ids: list[int]) -> torch.Tensor:
    """A pass without any cache: logits ``[n, vocab_size]``."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def assert_holds(speaker, ids: list[int]) -> None:
    """The speaker's cache is what a fresh one holds after `ids`."""
    assert speaker.ids == ids
    fresh = kv_adapter.new_cache("dynamic", speaker.model.config)
    if ids:
        speaker.model(torch.tensor([ids]), past_key_values=fresh)
    assert kv_adapter.n_cached_tokens(speaker.cache) == len(ids)
    stored, expected = kv_adapter.layer_tensors(speaker.cache), kv_adapter.layer_tensors(fresh)
    assert len(stored) >= len(expected)
    for mine, theirs in zip(stored, expected, strict=False):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def check_speaker(nb):
    """Random feeds, rollbacks and follows: logits equal a pass without a cache, and the cache equals a fresh one."""
    model, rng = tiny(), random.Random(10)
    speaker, ids = nb.Speaker(model), []
    for step in range(90):
        kind = rng.choice(("feed", "feed", "rollback", "follow", "prefill", "reset")) if step % 20 else "feed"
        new = some_ids(step, rng.randint(1, 5))
        if kind == "feed":
            got, ids = speaker.feed(new), ids + new
        elif kind == "follow":
            ids = ids[: rng.randint(0, len(ids))] + new * rng.randint(0, 1)
            ids = ids or new
            got = speaker.follow(ids)
            assert len(got) >= 1, "the next token's logits are there though everything is cached"
        elif kind == "prefill":
            ids = ids[: rng.randint(0, len(ids))] + new * rng.randint(0, 1)
            speaker.prefill(ids)
        elif kind == "rollback":
            ids = ids[: rng.choice((0, len(ids), rng.randint(0, len(ids))))]
            speaker.rollback(len(ids))
        else:
            speaker.reset()
            ids = []
        if kind in ("feed", "follow"):
            assert got.dtype == torch.float32 and got.device.type == "cpu"
            torch.testing.assert_close(got, logits_of(model, ids)[-len(got) :], atol=1e-5, rtol=1e-4)
        assert_holds(speaker, ids)


def check_forward(nb):
    calls = []

    def forward(rows, **how):
        calls.append(rows.shape[1])
        return tiny()(rows, **how)

    speaker = nb.Speaker(tiny(), forward)
    speaker.feed([1, 2, 3])
    speaker.follow([1, 2, 5, 6])
    assert calls == [3, 2], "`forward` runs every pass, and only what is not cached"


def test_a_rolled_back_cache_is_a_fresh_one(nb):
    check_speaker(nb)
    check_forward(nb)


def check_draft_tokens(nb):
    draft = nb.Speaker(noisy())
    for seed, gamma, warping in (
        (1, 4, {"temperature": 0.7}),
        (2, 1, {}),
        (3, 3, GREEDY),
        (3, 5, {"top_k": 3}),
        (4, 0, {}),
    ):
        ids = [*some_ids(1, 6), *some_ids(seed, 3)]
        drafted, q = nb.draft_tokens(draft, ids, gamma, warping, rng_of(seed))
        assert len(drafted) == gamma
        if gamma:
            expected = nb.warp(logits_of(noisy(), [*ids, *drafted])[len(ids) - 1 : -1], **warping)
            torch.testing.assert_close(q, expected, atol=1e-5, rtol=1e-4)
            generator = rng_of(seed)
            assert drafted == [nb.draw(row, generator) for row in q], "each is drawn from its own row of q"
            assert draft.ids == [*ids, *drafted][: len(draft.ids)], "the draft's cache holds nothing else"
    text = [*some_ids(1, 6), 5, 6]
    fed = []
    speaker = nb.Speaker(noisy(), lambda rows, **how: fed.append(rows.shape[1]) or noisy()(rows, **how))
    drafted, _ = nb.draft_tokens(speaker, text, 3, GREEDY, rng_of(0))
    fed.clear()
    nb.draft_tokens(speaker, [*text, drafted[0], 7], 2, GREEDY, rng_of(0))
    assert fed == [1, 1], "what is common stays cached; one token in a pass"


def test_a_draft_says_what_it_drew_from(nb):
    check_draft_tokens(nb)


# -- the loop ---------------------------------------------------------------------------------------
def proposer(nb, draft, warping, generator):
    return lambda ids, gamma: nb.draft_tokens(draft, ids, gamma, warping, generator)


def counted(model, passes: list[int]):
    """The model's forward, noting the tokens of each pass."""

    def forward(rows, **how):
        passes.append(rows.shape[1])
        return model(rows, **how)

    return forward


def check_greedy(nb, dtype=torch.float64):
    """Token-identical to plain decoding and to Transformers' own, for good, bad and perfect drafts; all counts add up."""
    model = tiny(0, 2, dtype)
    rates = []
    for seed, n_tokens in ((11, 24), (12, 1), (13, 17)):
        prompt = some_ids(seed, 1 if seed == 13 else 7)
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=n_tokens, do_sample=False, pad_token_id=0
        )[0, len(prompt) :].tolist()  # fmt: skip
        plain = nb.plain(nb.Speaker(model), prompt, n_tokens, GREEDY, rng_of(0))
        assert plain.ids == expected
        assert [(r.drafted, r.accepted) for r in plain.rounds] == [(0, 0)] * n_tokens
        good, bad, perfect = noisy(0, 0.03, dtype), tiny(1, 1, dtype), model
        for gamma, draft in itertools.product(range(1, 6), (good, bad, perfect, "lookup", "echo")):
            passes: list[int] = []
            target, generator = nb.Speaker(model, counted(model, passes)), rng_of(seed)
            if draft == "lookup":
                propose = lambda ids, g: (nb.lookup(ids, g), None)  # noqa: E731
            elif draft == "echo":  # too few, then too wrong
                propose = lambda ids, g: (ids[-1:][:g] if len(ids) % 2 else [], None)  # noqa: E731
            else:
                propose = proposer(nb, nb.Speaker(draft), GREEDY, generator)
            got = nb.speculate(target, propose, prompt, n_tokens, gamma, GREEDY, generator)
            assert got.ids == expected, (seed, gamma, draft)
            check_counts(got, prompt, n_tokens, gamma, passes)
            assert_holds(target, [*prompt, *got.ids][: len(target.ids)])
            assert len(target.ids) >= len(prompt) + n_tokens - 1
            if draft is perfect:
                assert all(r.accepted == r.drafted for r in got.rounds)
                assert len(got.rounds) == -(-n_tokens // (gamma + 1))
            if draft is good and gamma == 3:
                rates.append((sum(r.accepted for r in got.rounds), sum(r.drafted for r in got.rounds)))
            if gamma == 2 and draft is good:  # the cache of one answer serves the next where they begin alike
                again = nb.speculate(target, propose, [*prompt, *expected[:2], 1], 6, gamma, GREEDY, generator)
                fresh = nb.plain(nb.Speaker(model), [*prompt, *expected[:2], 1], 6, GREEDY, generator)
                assert again.ids == fresh.ids, "a used cache"
    accepted, drafted = map(sum, zip(*rates, strict=True))
    assert 0 < accepted < drafted, "the draft is right now and then, or nothing is tested here"


def check_counts(got, prompt, n_tokens, gamma, passes):
    assert len(got.ids) == n_tokens, "exactly as many tokens as asked for"
    assert all(0 <= r.accepted <= r.drafted <= gamma for r in got.rounds)
    emitted = [r.emitted for r in got.rounds]
    assert emitted[:-1] == [r.accepted + 1 for r in got.rounds[:-1]]
    assert sum(emitted[:-1]) < n_tokens <= sum(r.accepted + 1 for r in got.rounds), "the bonus counts once"
    assert sum(emitted) == n_tokens, "what the rounds emitted is what was said"
    prefill = [len(prompt) - 1] if len(prompt) > 1 else []
    assert passes == prefill + [r.drafted + 1 for r in got.rounds], "one target pass a round, over drafts and one more"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_speculation_is_token_identical(nb, dtype):
    check_greedy(nb, dtype)


def table_speaker(nb, table: torch.Tensor):
    """A Speaker whose next token depends on the last two, by a table of logits ``[vocab, vocab, vocab]``: fast and exact."""

    class Table(nb.Speaker):
        def __init__(self):
            self.reset()

        def reset(self):
            self.ids = []

        def rollback(self, n):
            del self.ids[n:]

        def feed(self, ids, n_logits=0, **how):
            start, self.ids = len(self.ids), [*self.ids, *ids]
            rows = [table[self.ids[max(i - 1, 0)], self.ids[i]] for i in range(start, len(self.ids))]
            return torch.stack(rows)[-n_logits:]

    return Table()


def sequences(nb, table: torch.Tensor, prompt: list[int], n_tokens: int, warping: dict) -> dict:
    """The probability of each answer of `n_tokens` tokens, by enumeration."""
    probs = {}
    for answer in itertools.product(range(table.shape[-1]), repeat=n_tokens):
        ids, prob = list(prompt), 1.0
        for token in answer:
            prob *= float(nb.warp(table[ids[-2], ids[-1]], **warping)[token])
            ids.append(token)
        probs[answer] = prob
    return probs


WARPINGS = [
    {"temperature": 0.5},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 2},
    {"temperature": 0.8, "top_p": 0.7},
]


def check_sampling(nb, warpings=WARPINGS, n: int = 2500):
    """Whole answers of three tokens against their exact probabilities, and the acceptance rate of the first draft."""
    tables = torch.randn(2, 3, 3, 3, generator=rng_of(21), dtype=torch.float64) * 1.2
    tables[1] = 0.5 * tables[0] + 0.5 * tables[1]
    prompt = [0, 2]
    for seed, warping in enumerate(warpings):
        target, draft, generator = table_speaker(nb, tables[0]), table_speaker(nb, tables[1]), rng_of(300 + seed)
        probs = sequences(nb, tables[0], prompt, 3, warping)
        for kind in ("draft", "lookup", "plain"):
            counts, accepted = Counter(), 0
            propose = proposer(nb, draft, warping, generator)
            if kind == "lookup":
                propose = lambda ids, g: ([(ids[-1] + 1) % 3, ids[-1]][:g], None)  # noqa: E731
            for _ in range(n if kind == "draft" else n // 2):
                if kind == "plain":
                    got = nb.plain(target, prompt, 3, warping, generator)
                else:
                    got = nb.speculate(target, propose, prompt, 3, 2, warping, generator)
                counts[tuple(got.ids)] += 1
                accepted += got.rounds[0].accepted > 0
            assert_sample_of(counts, probs, (kind, warping))
            if kind == "draft":
                p, q = (nb.warp(table[0, 2], **warping) for table in tables)
                assert_rate(accepted, n, float(torch.minimum(p, q).sum()), ("first draft", warping))


def test_sampled_answers_keep_their_distribution(nb):
    check_sampling(nb)


def check_accepts_itself(nb):
    """A draft that is the target is always right, at every temperature: acceptance compares what was drawn from."""
    model = tiny(0, 2, torch.float64)
    for warping in ({"temperature": 0.4}, {"temperature": 2.0, "top_k": 9}, {"top_p": 0.6}):
        generator = rng_of(31)
        propose = proposer(nb, nb.Speaker(model), warping, generator)
        got = nb.speculate(nb.Speaker(model), propose, some_ids(5, 6), 20, 3, warping, generator)
        assert [(r.drafted, r.accepted) for r in got.rounds] == [(3, 3)] * 5, warping


def test_the_target_as_its_own_draft_is_always_right(nb):
    check_accepts_itself(nb)


# -- prompt lookup ---------------------------------------------------------------------------------------
def found(ids: list[int], gamma: int, n_max: int, n_min: int, earliest: bool) -> list[int]:
    """Reference: all places of each suffix, the longest suffix first."""
    for n in range(n_max, n_min - 1, -1):
        places = [i for i in range(len(ids) - n) if ids[i : i + n] == ids[len(ids) - n :]] if n < len(ids) else []
        if places:
            start = (min if earliest else max)(places) + n
            return ids[start : start + gamma]
    return []


texts = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def check_lookup(nb):
    @quick(150)
    @given(texts, st.integers(0, 6), st.integers(1, 4), st.booleans())
    def holds(ids, gamma, n_max, earliest):
        for n_min in range(1, n_max + 1):
            expected = found(ids, gamma, n_max, n_min, earliest)
            assert list(nb.lookup(list(ids), gamma, n_max, n_min, earliest)) == expected

    holds()
    assert nb.lookup([7, 1, 2, 3, 8, 1, 2], 2) == [3, 8]
    assert nb.lookup([1, 5, 9, 1, 6, 4, 1], 1) == [6], "the latest place"
    assert nb.lookup([1, 2, 5, 2, 6, 1, 2], 1) == [5], "a longer n-gram before a later place"
    assert nb.lookup([4, 4, 4, 4], 3)[:1] == [4] and nb.lookup([1, 2, 3], 3) == [] and nb.lookup([1], 3) == []


def test_lookup_finds_the_longest_suffix_and_its_latest_place(nb):
    check_lookup(nb)


@cache
def vllm_lookup():
    """vLLM's search, cut out of its source (an import of vLLM takes seconds); None where it is not installed."""
    spec = importlib.util.find_spec("vllm")
    path = Path(next(iter(spec.submodule_search_locations))) / "v1/spec_decode/ngram_proposer.py" if spec else None
    if not path or not path.exists():
        return None
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == "_find_longest_matched_ngram_and_propose_tokens":
            node.decorator_list = []
            scope = {"np": np}
            exec(compile(ast.Module([node], []), str(path), "exec"), scope)
            return scope[node.name]
    return None


@quick(150)
@given(texts, st.integers(1, 5), st.integers(1, 4))
def test_the_earliest_place_is_what_transformers_and_vllm_take(nb, ids, gamma, n_max):
    generator = PromptLookupCandidateGenerator(
        num_output_tokens=gamma, max_matching_ngram_size=n_max, max_length=10_000
    )
    expected = generator.get_candidates(torch.tensor([ids]))[0][0].tolist()[len(ids) :]
    assert nb.lookup(ids, gamma, n_max, earliest=True) == expected
    if vllm_lookup():
        got = vllm_lookup()(np.array(ids, dtype=np.int32), 1, n_max, 10_000, gamma)
        assert nb.lookup(ids, gamma, n_max, earliest=True) == got.tolist()


# -- arithmetic ---------------------------------------------------------------------------------------
def check_expectations(nb):
    rng = np.random.default_rng(41)
    for alpha, gamma in itertools.product((0.0, 0.3, 0.72, 0.97, 1.0), (0, 1, 3, 6)):
        by_sum = math.fsum(alpha**i for i in range(gamma + 1))
        assert nb.expected_tokens(alpha, gamma) == pytest.approx(by_sum, rel=1e-9)
        accepted = np.cumprod(rng.random((200_000, gamma)) < alpha, axis=1).sum(axis=1) if gamma else np.zeros(1)
        assert nb.expected_tokens(alpha, gamma) == pytest.approx(1 + accepted.mean(), abs=0.02)
        assert nb.expected_speedup(alpha, gamma, 0.0) == pytest.approx(by_sum)
        assert nb.expected_speedup(alpha, gamma, 0.25) == pytest.approx(by_sum / (0.25 * gamma + 1))
        assert nb.expected_speedup(alpha, gamma, 0.25, 1.5) == pytest.approx(by_sum / (0.25 * gamma + 1.5))
    assert nb.expected_tokens(1 - 1e-9, 4) == pytest.approx(5, abs=1e-6)
    assert nb.expected_speedup(0.8, 5, 0.02) == pytest.approx(3.68928 / 1.1), "(1 - 0.262144) / 0.2 tokens"


def test_expected_tokens_are_what_chance_gives(nb):
    check_expectations(nb)


def check_expected_rounds(nb):
    """Along a text whose chances are 0 or 1: the counts of the loop itself. Otherwise: those of many played rounds."""
    rng = random.Random(44)
    for gamma, n_tokens in itertools.product((1, 2, 4), (1, 2, 7, 12)):
        table = torch.randn(3, 3, 3, generator=rng_of(gamma + n_tokens))
        text = nb.plain(table_speaker(nb, table), [0, 1], n_tokens, GREEDY, rng_of(0)).ids
        guesses = [token if rng.random() < 0.6 else (token + 1) % 3 for token in text]
        n_guesses = [rng.randint(0, gamma) for _ in text]

        def guess(ids, most, guesses=guesses, n_guesses=n_guesses):
            start = len(ids) - 2
            return guesses[start : start + min(most, n_guesses[start])], None

        def accept(start, most, text=text, guesses=guesses, n_guesses=n_guesses):
            end = start + min(most, n_guesses[start])
            return [float(a == b) for a, b in zip(text[start:end], guesses[start:end], strict=True)]

        rounds = nb.speculate(table_speaker(nb, table), guess, [0, 1], n_tokens, gamma, GREEDY, rng_of(0)).rounds
        judged = [sum(i < r.drafted and i <= r.accepted for r in rounds) for i in range(gamma)]
        good = [sum(i < r.accepted for r in rounds) for i in range(gamma)]
        passes, drafted, attempts, accepted = nb.expected_rounds(accept, n_tokens, gamma)
        assert passes == len(rounds) and drafted == sum(r.drafted for r in rounds)
        assert (list(attempts), list(accepted)) == (judged, good)
    chances = [rng.random() for _ in range(9)]
    played = np.zeros(8)
    for _ in range(20_000):
        start = 0
        while start < 9:
            row = chances[start : start + min(3, 9 - start - 1)]
            n = next((i for i, chance in enumerate(row) if rng.random() >= chance), len(row))
            played[:2] += 1, len(row)
            played[2 : 2 + min(n + 1, len(row))] += 1
            played[5 : 5 + n] += 1
            start += n + 1
    passes, drafted, attempts, accepted = nb.expected_rounds(lambda s, most: chances[s : s + most], 9, 3)
    assert [passes, drafted, *attempts, *accepted] == pytest.approx((played / 20_000).tolist(), abs=0.03)
    assert passes + sum(accepted) == pytest.approx(9), "every token is the target's own or an accepted draft"


def test_expected_rounds_are_what_the_loop_does(nb):
    check_expected_rounds(nb)


def check_costs(nb):
    rng = random.Random(43)
    sizes = [(rng.randint(1, 16), rng.randint(1, 9), rng.randint(0, 400)) for _ in range(80)] + [(1, 1, 8), (1, 1, 90)]
    width = len(nb.pass_features(1, 1, 0))
    truth = nb.Costs([0.01, *(0.002 * 0.1**i for i in range(width - 1))])
    fitted = nb.fit_costs([(*size, truth.seconds(*size)) for size in sizes])
    for size in [*sizes, (20, 6, 100)]:
        assert fitted.seconds(*size) == pytest.approx(truth.seconds(*size), rel=1e-4)
    assert truth.seconds(4, 5, 100) > truth.seconds(4, 1, 100) > 0
    assert truth.seconds(4, 5, 300) > truth.seconds(4, 5, 100)
    falling = nb.fit_costs([(1, n, 0, 1 / n) for n in range(1, 40)])
    assert min(falling.coefficients) >= 0


def test_costs_are_found_again(nb):
    check_costs(nb)


# -- a tree ---------------------------------------------------------------------------------------
@st.composite
def forests(draw):
    return [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(1, 12)))]


def line_of(parents: list[int], node: int) -> list[int]:
    """A node's ancestors from the context down, and itself."""
    line = [node]
    while parents[line[0]] >= 0:
        line.insert(0, parents[line[0]])
    return line


def check_tree_mask(nb):
    @quick(80)
    @given(forests(), st.integers(0, 7))
    def holds(parents, n_context):
        mask, positions = nb.tree_mask(parents, n_context), nb.tree_positions(parents, n_context)
        assert mask.dtype == torch.bool and mask.shape == (len(parents), n_context + len(parents))
        for node in range(len(parents)):
            line = line_of(parents, node)
            seen = torch.nonzero(mask[node])[:, 0].tolist()
            assert seen == [*range(n_context), *(n_context + i for i in line)]
            assert int(positions[node]) == n_context + len(line) - 1

    holds()


FOREST = [-1, 0, 0, -1, 3, 1, 3, -1, 5]


def check_tree_pass(nb):
    """One pass over a tree equals one pass for each of its lines, whether it is fed at once or level by level."""
    model, context = tiny(), some_ids(51, 7)
    tokens = some_ids(52, len(FOREST))
    for cuts in ([len(FOREST)], [1, 4, 5, len(FOREST)]):
        speaker = nb.Speaker(model)
        speaker.feed(context)
        rows, n_done = [], 0
        for cut in cuts:
            rows.append(nb.feed_tree(speaker, tokens[:cut], FOREST[:cut], n_done))
            n_done = cut
        got = torch.cat(rows)
        for node in range(len(FOREST)):
            line = [tokens[i] for i in line_of(FOREST, node)]
            torch.testing.assert_close(got[node], logits_of(model, [*context, *line])[-1], atol=1e-5, rtol=1e-4)
        path = line_of(FOREST, 8)
        nb.keep_path(speaker, len(context), path)
        assert_holds(speaker, [*context, *(tokens[i] for i in path)])
    speaker.rollback(len(context))
    nb.feed_tree(speaker, tokens, FOREST)
    nb.keep_path(speaker, len(context), [])
    assert_holds(speaker, context)


def test_a_tree_pass_equals_separate_passes(nb):
    check_tree_mask(nb)
    check_tree_pass(nb)


def check_grow_tree(nb):
    model, ids = noisy(), some_ids(53, 6)
    for widths in ((3, 2, 1), (1, 1, 1, 1), (2,), (2, 3), ()):
        draft = nb.Speaker(model)
        draft.feed([*some_ids(53, 4), 1])
        tree = nb.grow_tree(draft, ids, widths)
        assert len(tree.tokens) == len(tree.parents) == sum(math.prod(widths[: i + 1]) for i in range(len(widths)))
        assert all(parent < i for i, parent in enumerate(tree.parents))
        for node in [-1, *range(len(tree.tokens))]:
            line = line_of(tree.parents, node) if node >= 0 else []
            children = [i for i, parent in enumerate(tree.parents) if parent == node]
            assert tree.children(node) == children
            if len(line) == len(widths):
                assert not children
                continue
            row = logits_of(model, [*ids, *(tree.tokens[i] for i in line)])[-1]
            assert [tree.tokens[i] for i in children] == row.topk(widths[len(line)]).indices.tolist()
        assert_holds(draft, ids)


def test_a_tree_grows_the_drafts_best_guesses(nb):
    check_grow_tree(nb)


def check_walk(nb):
    rng = random.Random(54)
    for _ in range(60):
        parents = [rng.randint(-1, i - 1) for i in range(rng.randint(1, 9))]
        tokens = []
        for i, parent in enumerate(parents):  # siblings differ, as those of grow_tree do
            taken = {tokens[j] for j in range(i) if parents[j] == parent}
            tokens.append(rng.choice([t for t in range(12) if t not in taken][:3]))
        root, nodes = torch.zeros(12), torch.zeros(len(parents), 12)
        said = [rng.randrange(4) for _ in range(len(parents) + 1)]
        root[said[-1]] = 1
        for i in range(len(parents)):
            nodes[i, said[i]] = 1
        path, bonus = nb.verify_tree_greedy(nb.TokenTree(tokens, parents), root, nodes)
        node, expected = -1, []
        while True:
            following = [i for i, parent in enumerate(parents) if parent == node and tokens[i] == said[node]]
            if not following:
                break
            node = following[0]
            expected.append(node)
        assert (list(path), bonus) == (expected, said[node])


def check_speculate_tree(nb, dtype=torch.float64):
    model, seen = tiny(0, 2, dtype), []
    for seed, n_tokens in ((61, 20), (62, 1), (63, 9)):
        prompt = some_ids(seed, 1 if seed == 63 else 6)
        expected = nb.plain(nb.Speaker(model), prompt, n_tokens, GREEDY, rng_of(0)).ids
        for draft, widths in itertools.product(
            (noisy(0, 0.03, dtype), tiny(1, 1, dtype), model), ((3, 2, 1), (2, 2), (1, 1, 1))
        ):
            passes: list[int] = []
            target = nb.Speaker(model, counted(model, passes))
            got = nb.speculate_tree(target, nb.Speaker(draft), prompt, n_tokens, widths)
            assert got.ids == expected, (seed, widths)
            assert sum(r.emitted for r in got.rounds) == n_tokens
            assert all(0 <= r.accepted <= r.drafted <= len(widths) for r in got.rounds)
            assert len(passes) == len(got.rounds) + (len(prompt) > 1), "one target pass a round"
            assert_holds(target, [*prompt, *got.ids][:-1])
            if draft is model:
                assert len(got.rounds) == -(-n_tokens // (len(widths) + 1))
            if widths == (1, 1, 1):
                propose = proposer(nb, nb.Speaker(draft), GREEDY, rng_of(0))
                chain = nb.speculate(nb.Speaker(model), propose, prompt, n_tokens, 3, GREEDY, rng_of(0))
                assert [(r.drafted, r.accepted) for r in got.rounds] == [(r.drafted, r.accepted) for r in chain.rounds]
            seen.append((sum(r.accepted for r in got.rounds), sum(r.drafted for r in got.rounds)))
    assert any(0 < accepted < drafted for accepted, drafted in seen)


def test_a_tree_changes_no_greedy_token(nb):
    check_walk(nb)
    check_speculate_tree(nb)


def check_tree_sampling(nb, n: int = 8000):
    """The token at a node keeps its distribution: candidates drawn independently, without replacement, or chosen."""
    p, q = random_probs(71, 5, sharp=1.0), random_probs(72, 5, sharp=1.0)
    generator, rng = rng_of(73), random.Random(74)
    size, weights = 5, q.tolist()
    for kind in ("independent", "without replacement", "chosen"):
        counts, firsts, accepted = Counter(), 0, 0
        for _ in range(n):
            if kind == "independent":
                children, qs = rng.choices(range(size), weights, k=3), [q] * 3
            elif kind == "chosen":
                children = [1, 3, 0]
                qs = [torch.nn.functional.one_hot(torch.tensor(c), size).double() for c in children]
            else:
                children, qs, left = [], [], q.clone()
                for _ in range(3):
                    qs.append(left / left.sum())
                    children.append(rng.choices(range(size), left.tolist())[0])
                    left = left.clone()
                    left[children[-1]] = 0
            index, token = nb.verify_tree_sampling(list(children), p, qs, generator)
            assert index is None or children[index] == token
            counts[token] += 1
            firsts += index == 0
            accepted += index is not None
        assert_sample_of(counts, dict(enumerate(p.tolist())), kind)
        tv = 0.5 * sum(abs(counts[t] / n - float(p[t])) for t in range(size))
        assert tv < 2 * math.sqrt(size / n), (kind, tv)
        if kind != "chosen":
            assert_rate(firsts, n, float(torch.minimum(p, q).sum()), f"{kind}: the first candidate as in a chain")
        else:
            assert_rate(accepted, n, float(p[[1, 3, 0]].sum()), "chosen candidates: accepted when the target says them")
            assert_rate(firsts, n, float(p[1]), "a chosen first candidate")
    assert nb.verify_tree_sampling([], p, [], rng_of(0))[0] is None


def test_several_candidates_keep_the_distribution(nb):
    check_tree_sampling(nb)


# -- broken twins ---------------------------------------------------------------------------------------
cold = partial(check_sampling, warpings=[{"temperature": 0.5}], n=1200)  # fewer draws: a twin is far off
JUDGE = "if u * q[i, token] >= p[i, token]:"
CORRECT = "draw(residual(p[i], q[i]), generator)"
RESIDUAL = "return left / mass if mass > 0 else p"
ROLLBACK = "target.rollback(len(ids) + len(emitted) - 1)"
PROPOSED = "q.append(warp(speaker.follow([*ids, *drafted])[-1], **warping))"
DRAWN = "drafted.append(draw(q[-1], generator))"
CATCH_UP = "        self.rollback(n)\n        return n\n"
ONE_HOT = "torch.nn.functional.one_hot(torch.tensor(drafted, dtype=torch.long), p.shape[-1]).to(p.dtype)"
SMALLEST = "        logits = logits.masked_fill(logits < smallest, -torch.inf)\n"
SEARCH = "return int(torch.searchsorted(cdf, u, right=True).clamp(max=len(probs) - 1))"
LENGTHS = "range(min(n_max, len(ids) - 1), n_min - 1, -1)"
ANCESTORS = "            mask[i] = mask[parent]\n"
SIBLINGS = "            mask[i, n_context : n_context + i] |= torch.tensor([p == parent for p in parents[:i]])\n"
DEPTH = "positions.append(n_context if parent < 0 else positions[parent] + 1)"
MOVED = "stored[..., n_context + slot, :] = stored[..., n_context + node, :]"
KEPT = "keep_path(target, len(ids) - 1, [0, *(node + 1 for node in path)])"
RENEWED = "        p = residual(p, q)  # the next candidate has to make up for less\n"
LAST = "    return None, draw(p, generator)"
TWINS = {
    "probabilities compared before temperature": (
        cold,
        (PROPOSED, "q.append(warp(speaker.follow([*ids, *drafted])[-1]))"),
        (DRAWN, "drafted.append(draw(warp(q[-1].log(), **warping), generator))"),
    ),
    "a target compared before temperature": (cold, ("p = warp(logits, **warping)", "p = warp(logits)")),
    "top-k and top-p forgotten at the target": (
        check_accepts_itself,
        ("p = warp(logits, **warping)", "p = warp(logits, warping.get('temperature', 1.0))"),
    ),
    "the residual forgotten": (check_verify, (CORRECT, "draw(p[i], generator)")),
    "the residual forgotten in whole answers": (cold, (CORRECT, "draw(p[i], generator)")),
    "the residual forgotten, at once": (check_first_tokens, ("draws(after_rejection(p, q))", "draws(p)")),
    "a residual that is not made to sum to one": (check_residual, (RESIDUAL, "return left if mass > 0 else p")),
    "a residual without its way out": (check_residual, (RESIDUAL, "return left / mass")),
    "a residual of the draft": (check_residual, ("left = (p - q).clamp(min=0)", "left = (q - p).clamp(min=0)")),
    "p and q swapped": (check_verify, (JUDGE, "if u * p[i, token] >= q[i, token]:")),
    "p and q swapped, at once": (
        check_first_tokens,
        ("u * q_compared[drafted] < p_compared[drafted]", "u * p_compared[drafted] < q_compared[drafted]"),
    ),
    "everything accepted": (check_verify_greedy, (JUDGE, "if u > 1:")),
    "accepted by p alone": (check_verify, (JUDGE, "if u >= p[i, token]:")),
    "a bonus from the last draft's row": (
        check_verify,
        ("draw(p[len(drafted)], generator)", "draw(p[len(drafted) - 1], generator)"),
    ),
    "a bonus counted twice": (
        check_greedy,
        ("return self.accepted + 1", "return self.accepted + 1 + (self.accepted == self.drafted)"),
    ),
    "a bonus said twice": (
        check_greedy,
        ("        said += emitted\n", "        said += emitted + emitted[-1:] * (len(emitted) == gamma + 1)\n"),
    ),
    "a bonus that is not counted": (check_greedy, ("return self.accepted + 1", "return self.accepted")),
    "a bonus counted as accepted": (
        check_greedy,
        ("Round(len(drafted), len(emitted) - 1)", "Round(len(drafted), len(emitted))"),
    ),
    "no rollback of rejected keys and values": (check_greedy, (ROLLBACK, "pass")),
    "ids rolled back, keys and values not": (check_speaker, ("            kv_adapter.truncate(self.cache, n)\n", "")),
    "keys and values rolled back, ids not": (check_speaker, ("            del self.ids[n:]\n", "")),
    "a rollback one too short": (check_greedy, (ROLLBACK, "target.rollback(len(ids) + len(emitted))")),
    "a rollback one too far": (check_greedy, (ROLLBACK, "target.rollback(len(ids) + len(emitted) - 2)")),
    "a draft that keeps what was rejected": (
        check_draft_tokens,
        (CATCH_UP, "        return n\n"),
    ),
    "a draft that says other distributions than it drew from": (
        check_draft_tokens,
        (DRAWN, "drafted.append(int(q[-1].argmax()))"),
    ),
    "a draft that is fed anew each time": (
        check_draft_tokens,
        (CATCH_UP, "        self.reset()\n        return 0\n"),
    ),
    "more tokens than asked for": (check_greedy, ("min(gamma, n_tokens - len(said) - 1)", "gamma")),
    "a sure draft with a flat distribution": (
        cold,
        (ONE_HOT, "torch.full((len(drafted), p.shape[-1]), 1 / p.shape[-1], dtype=p.dtype)"),
    ),
    "top-p that drops the token that crosses it": (
        check_warp,
        ("(before >= top_p) & (before > 0)", "(before + probs >= top_p) & (before > 0)"),
    ),
    "top-p of what top-k dropped": (
        check_warp,
        ("logits = logits / temperature\n", "logits = logits / temperature\n    everything = logits\n"),
        ("ranked, order = logits.sort(", "ranked, order = everything.sort("),
        ("scatter_(-1, order, ranked)\n", "scatter_(-1, order, ranked) + (logits - everything)\n"),
    ),
    "top-k with one more": (check_warp, ("logits.topk(top_k, dim=-1)", "logits.topk(top_k + 1, dim=-1)")),
    "temperature multiplied": (check_warp, ("logits = logits / temperature", "logits = logits * temperature")),
    "a draw that can take what is impossible": (
        check_draw,
        (SEARCH, "return int(torch.searchsorted(cdf, u).clamp(max=len(probs) - 1)) + 1"),
    ),
    "lookup that takes any place": (check_lookup, ("reversed(starts) if earliest else starts", "reversed(starts)")),
    "lookup that finds the suffix itself": (
        check_lookup,
        ("range(len(ids) - n - 1, -1, -1)", "range(len(ids) - n, -1, -1)"),
    ),
    "lookup that takes the shortest": (check_lookup, (LENGTHS, "range(n_min, min(n_max, len(ids) - 1) + 1)")),
    "lookup off by one": (
        check_lookup,
        ("ids[start + n : start + n + gamma]", "ids[start + n - 1 : start + n - 1 + gamma]"),
    ),
    "an expectation without the bonus": (
        check_expectations,
        ("(1 - alpha ** (gamma + 1)) / (1 - alpha)", "(1 - alpha**gamma) / (1 - alpha)"),
    ),
    "a sure draft's bonus forgotten": (check_expectations, ("return gamma + 1.0 if", "return gamma + 0.0 if")),
    "a speed-up with one draft pass more": (check_expectations, ("/ (gamma * c + v)", "/ ((gamma + 1) * c + v)")),
    "a round that goes on after a rejection": (
        check_expected_rounds,
        ("begins[start + i + 1] += reach * (1 - chance)", "begins[start + i + 2] += reach * (1 - chance)"),
    ),
    "a full round without its bonus": (check_expected_rounds, ("begins[end + 1] += reach", "begins[end] += reach")),
    "positions that are judged whatever came before": (
        check_expected_rounds,
        ("attempts[i] += reach", "attempts[i] += begins[start]"),
    ),
    "chances that do not multiply": (check_expected_rounds, ("reach * chance, start + i + 1", "chance, start + i + 1")),
    "a last round that drafts too far": (
        check_expected_rounds,
        ("accept(start, min(gamma, n_tokens - start - 1))", "accept(start, min(gamma, n_tokens - start))"),
    ),
    "absolute errors": (
        check_costs,
        ("features / seconds[:, None] / scale, np.ones(len(seconds))", "features / scale, 1 / seconds"),
    ),
    "a tree mask that sees siblings": (check_tree_pass, (ANCESTORS, ANCESTORS + SIBLINGS)),
    "a tree mask that sees all nodes before": (check_tree_mask, (ANCESTORS, "            mask[i] = mask[i - 1]\n")),
    "a tree mask without the node itself": (check_tree_mask, ("        mask[i, n_context + i] = True\n", "")),
    "a tree mask without grandparents": (
        check_tree_mask,
        (ANCESTORS, "            mask[i, n_context + parent] = True\n"),
    ),
    "positions off by one": (
        check_tree_pass,
        ("positions.append(n_context if parent < 0", "positions.append(n_context + 1 if parent < 0"),
    ),
    "positions by place, not by depth": (check_tree_pass, (DEPTH, "positions.append(n_context + len(positions))")),
    "positions that count fed nodes as context": (
        check_tree_pass,
        ("n_context = len(speaker.ids) - n_done", "n_context = len(speaker.ids)"),
    ),
    "a path whose keys stay where they were": (check_tree_pass, (MOVED, "pass")),
    "a tree left in the draft's cache": (
        check_grow_tree,
        ("    draft.rollback(len(ids))\n    return tree", "    return tree"),
    ),
    "the least probable children": (check_grow_tree, ("row.topk(width).indices", "(-row).topk(width).indices")),
    "a walk that ends a step late": (check_walk, ("return path, best", "return path[:-1], best")),
    "a walk that takes any child": (check_speculate_tree, ("if tree.tokens[child] == best]", "]")),
    "a bonus of the wrong node": (
        check_walk,
        ("(logits_root if node < 0 else logits_nodes[node])", "(logits_root if node < 0 else logits_nodes[path[0]])"),
    ),
    "a tree whose rejected keys stay": (
        check_speculate_tree,
        (KEPT, "target.ids[len(ids) :] = [tree.tokens[node] for node in path]"),
    ),
    "a residual that is not renewed between candidates": (check_tree_sampling, (RENEWED, "")),
    "a last draw from the target itself": (
        check_tree_sampling,
        (RENEWED, "        before, p = (before if index else p), residual(p, q)\n"),
        (LAST, "    return None, draw(before if children else p, generator)"),
    ),
    "the same q after a draw without replacement": (
        check_tree_sampling,
        ("(zip(children, qs, strict=True))", "((c, qs[0]) for c in children)"),
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_broken_twin_is_caught(load_algorithms, name):
    check, *mutations = TWINS[name]
    twin = load_algorithms(NAME, *mutations)
    with pytest.raises(CAUGHT):
        check(twin)


# -- exercises ---------------------------------------------------------------------------------------
answers = partial(notebook_cells.answers, NAME)
edited = partial(notebook_cells.edited, NAME)
ANSWERS = checked_functions(NAME)


def _mean_over_the_vocabulary(p, q):
    ratio = torch.where(q > 0, p / q, torch.ones_like(p)).clamp(max=1)
    return ratio.mean(dim=1), answers("solution")["acceptance_and_residual"](p, q)[1]


def _softmax_of_the_difference(p, q):
    return answers("solution")["acceptance_and_residual"](p, q)[0], (p - q).softmax(dim=1)


def _the_closed_form(alpha, c, costs):
    table = [(1 - alpha ** (g + 1)) / (1 - alpha) / (g * c + costs[g]) for g in range(len(costs))]
    return table.index(max(table)), max(table)


def _stops_at_the_first_that_is_worse(alpha, c, costs):
    best = (0, 1.0)
    for gamma in range(1, len(costs)):
        speedup = sum(alpha**i for i in range(gamma + 1)) / (gamma * c + costs[gamma])
        if speedup <= best[1]:
            break
        best = (gamma, speedup)
    return best


def _most_tokens(alpha, c, costs):
    gamma = len(costs) - 1
    return gamma, sum(alpha**i for i in range(gamma + 1)) / (gamma * c + costs[gamma])


def _the_buggy_verify(*arguments):
    return answers("exercise")["buggy_verify"](*arguments)


def _samples_the_target(target_logits, draft_logits, drafted, temperature, generator):
    """The right distribution, and nothing gained: each token is the target's own, accepted where the draft said it too."""
    emitted = []
    for row, token in zip((target_logits / temperature).softmax(-1), [*drafted, None], strict=True):
        emitted.append(int(torch.multinomial(row, 1, generator=generator)))
        if emitted[-1] != token:
            break
    return emitted


def _never_accepts(target_logits, draft_logits, drafted, temperature, generator):
    return [int(torch.multinomial((target_logits[0] / temperature).softmax(-1), 1, generator=generator))]


def _always_accepts(target_logits, draft_logits, drafted, temperature, generator):
    last = (target_logits[-1] / temperature).softmax(-1)
    return [*drafted, int(torch.multinomial(last, 1, generator=generator))]


def _greedy(target_logits, draft_logits, drafted, temperature, generator):
    best = target_logits.argmax(-1).tolist()
    n = next((i for i, token in enumerate(drafted) if token != best[i]), len(drafted))
    return best[: n + 1]


def _other_chance(target_logits, draft_logits, drafted, temperature, generator):
    return answers("solution")["mended_verify"](
        target_logits, draft_logits, drafted, temperature, torch.default_generator
    )


def _over_all_rounds(rounds):
    longest = max(drafted for drafted, _, _ in rounds)
    rates = [sum(accepted > i for _, accepted, _ in rounds) / len(rounds) for i in range(longest)]
    return rates, sum(emitted for _, _, emitted in rounds) / len(rounds)


def _one_alpha(rounds):
    rates, tokens = answers("solution")["per_position"](rounds)
    drafted = sum(d for d, _, _ in rounds)
    return [sum(a for _, a, _ in rounds) / drafted if drafted else None] * len(rates), tokens


def _from_emitted(rounds):
    rates, _ = answers("solution")["per_position"]([(d, e - 1, e) for d, _, e in rounds])
    return rates, sum(e for _, _, e in rounds) / len(rounds)


def _without_the_last_round(rounds):
    rates, _ = answers("solution")["per_position"](rounds[:-1] or rounds)
    return rates, answers("solution")["per_position"](rounds)[1]


def _fixed(gamma):
    return lambda confidences, recent, c: len(confidences) < gamma


def _threshold(limit):
    return lambda confidences, recent, c: not confidences or confidences[-1] > limit


def _product(limit):
    return lambda confidences, recent, c: math.prod(confidences) > limit


def _recent_rate_only(confidences, recent, c):
    alpha = (sum(a for _, a in recent) + 1) / (sum(a + (a < d) for d, a in recent) + 1.5)
    n = len(confidences)
    return alpha ** (n + 1) * (1 + c * n) > c * sum(alpha**i for i in range(n + 1))


def _blind_to_cost(confidences, recent, c):
    return answers("solution")["wants_more"](confidences, recent, 0.1)


def _blind_to_the_past(confidences, recent, c):
    return answers("solution")["wants_more"](confidences, [], c)


def _only_the_last_confidence(confidences, recent, c):
    return answers("solution")["wants_more"](confidences[-1:], recent, c)


def _by_a_coin():
    rng = random.Random(0)
    return lambda confidences, recent, c: rng.random() < 0.6


def _the_longest_accepted(confidences, recent, c):
    """Transformers' heuristic in short: as far as the best recent round went, and one more."""
    return len(confidences) < max((a for _, a in recent), default=4) + 1 and c <= 1


WRONG = [
    ("08.1", _mean_over_the_vocabulary, "(acceptance)"),
    ("08.1", _softmax_of_the_difference, "(residual)"),
    ("08.2", _the_closed_form, "a sure draft"),
    ("08.2", _stops_at_the_first_that_is_worse, "costs that jump"),
    ("08.2", _most_tokens, "a middle gamma is best"),
    ("08.3", _the_buggy_verify, "temperature below 1: the first token is distributed"),
    ("08.3", _samples_the_target, "accepted as often as p and q agree"),
    ("08.3", _never_accepts, "accepted as often as p and q agree"),
    ("08.3", _always_accepts, "the first token is distributed"),
    ("08.3", _greedy, "the first token is distributed"),
    ("08.3", _other_chance, "all chance comes from the generator"),
    ("08.4", _over_all_rounds, "only where the round got so far"),
    ("08.4", _one_alpha, "only where the round got so far"),
    ("08.4", _from_emitted, "a cut round"),
    ("08.4", _without_the_last_round, "only where the round got so far"),
    *(("08.5", _fixed(gamma), "with nothing known" if gamma == 0 else "") for gamma in range(9)),
    *(("08.5", _threshold(limit), "") for limit in (0.0, 0.3, 0.5, 0.7, 0.9)),
    *(("08.5", _product(limit), "") for limit in (0.0, 0.2, 0.4, 0.6)),
    ("08.5", _recent_rate_only, "surely rejected"),
    ("08.5", _blind_to_cost, "slower than the target"),
    ("08.5", _blind_to_the_past, "was always wrong is not asked again"),
    ("08.5", _only_the_last_confidence, "surely rejected"),
    ("08.5", _by_a_coin(), ""),
    ("08.5", _the_longest_accepted, "surely rejected"),
]


@pytest.mark.parametrize(("number", "answer", "words"), WRONG, ids=[f"{n} {i}" for i, (n, _, _) in enumerate(WRONG)])
def test_typical_wrong_answers_fail_with_the_property_named(number, answer, words):
    assert_names_what_broke(exercises.check(number, answer), words)


BOTH = "common.sum(dim=1), torch.where(total > 0, left / total, p)"
ROUND = "        speedup = sum(alpha**i for i in range(gamma + 1)) / (gamma * c + costs[gamma])\n"
CORRECTED = "draw((p[i] - q[i]).clamp(min=0))"
RATIO = ">= p[i, token] / q[i, token]"
HEATED = "(draft_logits / temperature).softmax(dim=-1)"
JUDGED = "drafted > position and accepted >= position"
TOKENS = "sum(emitted for _, _, emitted in rounds) / len(rounds)"
WORTH = "all_right * following * (1 + c * len(confidences)) > tokens * c"
WRONG_EDITS = [
    ("08.1", "left = p - common", "left = q - common", "(residual)"),
    ("08.1", "left = p - common", "left = (p - q).abs()", "(residual)"),
    ("08.1", "left / total", "left", "(residual)"),
    ("08.1", "left / total", "left / total.sum()", "each row by itself"),
    ("08.1", "torch.where(total > 0, left / total, p)", "left / total", "p where nothing is ever rejected"),
    ("08.1", "left / total, p)", "left / total, torch.zeros_like(p))", "p where nothing is ever rejected"),
    (
        "08.1",
        "left / total, p)",
        "left / total, torch.full_like(p, 1 / p.shape[1]))",
        "p where nothing is ever rejected",
    ),
    ("08.1", "torch.where(total > 0, left / total, p)", "left / total.clamp(min=1e-9)", "p where nothing is ever"),
    (
        "08.1",
        "torch.where(total > 0, left / total, p)",
        "left / total if (total > 0).all() else p",
        "each row by itself, one",
    ),
    ("08.1", "total > 0", "total > 0.2", "(residual)"),
    ("08.1", "common.sum(dim=1)", "(p * q).sum(dim=1)", "(acceptance)"),
    ("08.1", "common.sum(dim=1)", "(p * (p / q).clamp(max=1)).nansum(dim=1)", "(acceptance)"),
    ("08.1", "common.sum(dim=1)", "1 - common.sum(dim=1)", "(acceptance)"),
    ("08.1", "common.sum(dim=1)", "common.sum(dim=1, keepdim=True)", "(acceptance) (shape)"),
    ("08.1", "common.sum(dim=1)", "common.sum() / len(p)", "(acceptance) (shape)"),
    ("08.1", BOTH, "torch.where(total > 0, left / total, p), common.sum(dim=1)", "(acceptance) (shape)"),
    ("08.1", BOTH, "common.sum(dim=1)", "a pair (acceptance, residual)"),
    ("08.1", BOTH, "dict(acceptance=common.sum(dim=1), residual=left)", "a pair (acceptance, residual)"),
    ("08.2", "range(gamma + 1)", "range(gamma)", "a middle gamma is best"),
    ("08.2", "range(gamma + 1)", "range(1, gamma + 1)", "a middle gamma is best"),
    ("08.2", "range(gamma + 1)", "range(gamma + 2)", "a middle gamma is best"),
    ("08.2", "gamma * c +", "", "a middle gamma is best"),
    ("08.2", "gamma * c +", "(gamma + 1) * c +", "a middle gamma is best"),
    ("08.2", "gamma * c +", "c +", "a middle gamma is best"),
    ("08.2", "+ costs[gamma]", "+ 1", "costs costs[gamma] of the target"),
    ("08.2", "+ costs[gamma]", "+ costs[gamma - 1]", "costs costs[gamma] of the target"),
    ("08.2", "gamma * c + costs[gamma]", "gamma * c * costs[gamma] + 1", "costs costs[gamma] of the target"),
    ("08.2", "range(1, len(costs))", "range(1, len(costs) - 1)", "a sure draft"),
    ("08.2", "range(1, len(costs))", "range(1, min(len(costs), 20))", "many gammas"),
    ("08.2", "speedup > best[1]", "speedup >= best[1]", "of equals the smallest"),
    ("08.2", "speedup > best[1]", "speedup > best[1] * 1.05", "(gamma)"),
    ("08.2", "(0, 1.0 / costs[0])", "(1, 0.0)", "always wrong is not asked"),
    ("08.2", "(0, 1.0 / costs[0])", "(0, 0.0)", "always wrong is not asked"),
    ("08.2", "    return best\n", "    return best[0]\n", "a pair (gamma, speed-up)"),
    ("08.2", "    return best\n", "    return best[::-1]\n", "a middle gamma is best (gamma)"),
    ("08.2", "    return best\n", "    return best[0], best[1] - 1\n", "a middle gamma is best (speed-up)"),
    ("08.2", "    return best\n", "    return best[0], round(best[1], 2)\n", "a middle gamma is best (speed-up)"),
    ("08.2", ROUND, ROUND.replace("alpha**i", "alpha"), "a middle gamma is best"),
    ("08.3", CORRECTED, "draw(p[i])", "temperature 1: the first token"),
    ("08.3", CORRECTED, "draw((p[i] - q[i]).abs())", "temperature 1: the first token"),
    ("08.3", CORRECTED, "draw(q[i])", "temperature 1: the first token"),
    ("08.3", CORRECTED, "int((p[i] - q[i]).argmax())", "temperature 1: the first token"),
    (
        "08.3",
        CORRECTED,
        "draw((target_logits[i].softmax(-1) - draft_logits[i].softmax(-1)).clamp(min=0))",
        "temperature",
    ),
    ("08.3", HEATED, "draft_logits.softmax(dim=-1)", "temperature below 1"),
    ("08.3", "(target_logits / temperature)", "target_logits", "temperature below 1"),
    ("08.3", "(target_logits / temperature)", "(target_logits * temperature)", "temperature below 1"),
    ("08.3", "(target_logits / temperature)", "(target_logits / max(temperature, 0.2))", "nearly greedy"),
    ("08.3", "(target_logits / temperature)", "(target_logits / min(temperature, 1))", "temperature above 1"),
    ("08.3", RATIO, ">= q[i, token] / p[i, token]", "temperature 1: the first token"),
    ("08.3", RATIO, ">= p[i, token]", "temperature 1: "),
    ("08.3", RATIO, "< p[i, token] / q[i, token]", "temperature 1: "),
    ("08.3", RATIO, ">= (p[i, token] / q[i, token]) ** (1 / temperature)", "temperature below 1"),
    ("08.3", "torch.rand((), generator=generator)", "0.5", "temperature 1: "),
    ("08.3", "draw(p[-1])]", "draw(p[-2])]", "temperature 1: the third token"),
    ("08.3", "draw(p[-1])]", "draw(p[0])]", "temperature 1: the third token"),
    ("08.3", "draw(p[-1])]", "draw(target_logits[-1].softmax(-1))]", "temperature below 1: the third token"),
    ("08.3", "draw(p[-1])]", "int(p[-1].argmax())]", "temperature 1: the third token"),
    ("08.3", "    return [*drafted, draw(p[-1])]", "    return list(drafted)", "temperature 1: "),
    ("08.3", "[*drafted[:i], ", "[*drafted[: i + 1], ", "temperature 1: the first token"),
    (
        "08.3",
        "return [*drafted[:i], draw((p[i] - q[i]).clamp(min=0))]",
        "return drafted[:i]",
        "drafted ids and then one more",
    ),
    ("08.3", "return [*drafted, draw(p[-1])]", "return draw(p[-1])", "drafted ids and then one more"),
    ("08.3", "return [*drafted, draw(p[-1])]", "return ' '.join(map(str, drafted))", "drafted ids and then one more"),
    ("08.3", "torch.rand((), generator=generator)", "torch.rand(())", "all chance comes from the generator"),
    ("08.3", "1, generator=generator", "1", "all chance comes from the generator"),
    ("08.4", JUDGED, "drafted > position", "only where the round got so far"),
    ("08.4", JUDGED, "accepted >= position", "a short draft says nothing"),
    ("08.4", JUDGED, "drafted > position and accepted > position", "only where the round got so far"),
    ("08.4", JUDGED, "drafted >= position and accepted >= position", "a short draft says nothing"),
    ("08.4", "accepted > position", "accepted == position + 1", "only where the round got so far"),
    ("08.4", "if judged else None", "if judged else 0.0", "after a rejection nothing is judged (position 2)"),
    ("08.4", "if judged else None", "if judged else 1.0", "after a rejection nothing is judged (position 2)"),
    ("08.4", "        rates.append(sum", "        if judged:\n            rates.append(sum", "(how many rates)"),
    ("08.4", "max(drafted for drafted, _, _ in", "max(a for _, a, _ in", "(how many rates)"),
    ("08.4", "max(drafted for", "(lambda d: list(d)[0])(drafted for", "a short draft says nothing"),
    ("08.4", TOKENS, "sum(accepted + 1 for _, accepted, _ in rounds) / len(rounds)", "a cut round emits less"),
    (
        "08.4",
        TOKENS,
        "sum(emitted for _, _, emitted in rounds) / sum(d > 0 for d, _, _ in rounds)",
        "a round without a draft",
    ),
    ("08.4", TOKENS, "sum(accepted for _, accepted, _ in rounds) / len(rounds)", "(tokens a pass)"),
    ("08.4", TOKENS, "sum(emitted for _, _, emitted in rounds)", "(tokens a pass)"),
    ("08.4", TOKENS, "sum(emitted / (drafted + 1) for drafted, _, emitted in rounds) / len(rounds)", "(tokens a pass)"),
    (
        "08.4",
        "for drafted, accepted, _ in rounds)",
        "for drafted, accepted, e in rounds if e > accepted)",
        "a cut round",
    ),
    ("08.4", f"return rates, {TOKENS}", "return rates", "a pair (rates, tokens a pass)"),
    ("08.4", f"return rates, {TOKENS}", f"return {TOKENS}, rates", "a position is judged"),
    ("08.4", f"return rates, {TOKENS}", f"return dict(enumerate(rates)), {TOKENS}", "a position is judged"),
    ("08.5", WORTH, "following > c", "surely rejected"),
    ("08.5", WORTH, "all_right * following > 0.3", "slower than the target"),
    ("08.5", WORTH, "all_right * following * (1 + c * len(confidences)) < tokens * c", "with nothing known"),
    ("08.5", WORTH, "tokens < 3", "is sure and costs little goes on"),
    ("08.5", WORTH, "all_right * following * (1 + c * len(confidences)) > 3 * tokens * c", "where confidence tells"),
    ("08.5", "all_right *= confidence", "all_right = confidence", "surely rejected"),
    ("08.5", "all_right *= confidence", "all_right *= confidence**3", "never far behind"),
    ("08.5", "(accepted + 1) / (judged + 1.5)", "1.0", "always wrong is not asked again"),
    ("08.5", "(accepted + 1) / (judged + 1.5)", "0.01", "with nothing known"),
    ("08.5", "(accepted + 1) / (judged + 1.5)", "(accepted / judged if judged else 0.0)", "with nothing known"),
    ("08.5", f"return {WORTH}", f"return 'yes' if {WORTH} else 'no'", "yes or no"),
    ("08.5", f"return {WORTH}", "return len(confidences)", "with nothing known"),
    ("08.5", f"return {WORTH}", f"return [{WORTH}]", "yes or no"),
]


@pytest.mark.parametrize(("number", "old", "new", "words"), WRONG_EDITS)
def test_a_solution_made_wrong_fails_with_the_property_named(number, old, new, words):
    assert_names_what_broke(exercises.check(number, edited(number, (old, new))), words)


RIGHT_EDITS = [
    ("08.5", WORTH, "all_right * following > c"),
    ("08.5", "confidences[-1] if confidences else ", ""),
    ("08.1", BOTH, "[1 - left.sum(dim=1), torch.where(total > 0, left / total, p)]"),
    ("08.1", "common.sum(dim=1)", "1 - 0.5 * (p - q).abs().sum(dim=1)"),
    ("08.1", BOTH, "common.sum(dim=1).numpy(), torch.where(total > 0, left / total, p).tolist()"),
    ("08.1", BOTH, "common.sum(dim=1).float(), torch.where(total > 0, left / total, p).float()"),
    ("08.1", "left = p - common", "left = (p - q).clamp(min=0)"),
    ("08.2", "sum(alpha**i for i in range(gamma + 1))", "float(np.sum(np.float64(alpha) ** np.arange(gamma + 1)))"),
    (
        "08.2",
        "sum(alpha**i for i in range(gamma + 1))",
        "(gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha))",
    ),
    ("08.2", "    return best\n", "    return [np.int64(best[0]), torch.tensor(best[1], dtype=torch.float64)]\n"),
    ("08.2", "    return best\n", "    costs.clear()\n    return np.array(best)\n"),
    ("08.3", "    return [*drafted, draw(p[-1])]", "    return torch.tensor([*drafted, draw(p[-1])])"),
    ("08.3", "    return [*drafted, draw(p[-1])]", "    return (*drafted, draw(p[-1]))"),
    ("08.3", "torch.rand((), generator=generator)", "torch.rand(1, generator=generator, dtype=torch.float64)"),
    (
        "08.3",
        f"torch.rand((), generator=generator) {RATIO}",
        "torch.rand((), generator=generator) * q[i, token] >= p[i, token]",
    ),
    ("08.3", CORRECTED, "draw(torch.where(p[i] > q[i], p[i] - q[i], 0.0))"),
    ("08.4", "if judged else None", "if judged else math.nan"),
    ("08.4", f"return rates, {TOKENS}", f"return tuple(rates), np.float64({TOKENS})"),
    ("08.4", f"return rates, {TOKENS}", f"return [np.array(rates, dtype=float), {TOKENS}]"),
    ("08.4", JUDGED, "min(accepted, drafted - 1) >= position"),
    ("08.5", f"return {WORTH}", f"return int({WORTH})"),
    ("08.5", f"return {WORTH}", f"return np.bool_({WORTH})"),
    (
        "08.5",
        WORTH,
        "(tokens + all_right * following) / (1 + c * (len(confidences) + 1)) > tokens / (1 + c * len(confidences))",
    ),
    (
        "08.5",
        f"return {WORTH}",
        "rate = sum(a + 1 for _, a in recent) / sum(1 + c * d for d, _ in recent) if recent else 1\n"
        "    return all_right * following > max(rate, 1) * c",
    ),
    (
        "08.5",
        "confidences[-1] if confidences else ",
        "0.8 * confidences[-1] + 0.2 * math.prod(confidences) if confidences else ",
    ),
]


@pytest.mark.parametrize(("number", "old", "new"), RIGHT_EDITS)
def test_a_solution_in_other_words_passes(number, old, new):
    result = exercises.check(number, edited(number, (old, new)))
    assert result.state == "pass", result.message


@pytest.mark.parametrize("number", ANSWERS)
@pytest.mark.parametrize("value", [3, "a text", [], (None,), {}, float("nan")])
def test_an_answer_of_another_kind_fails_and_names_the_input(number, value):
    result = exercises.check(number, lambda *_, **__: value)
    assert_names_what_broke(result, "")


@pytest.mark.parametrize("number", ANSWERS)
def test_an_error_in_an_answer_shows_the_input(number):
    def answer(*_, **__):
        raise KeyError("mine")

    result = exercises.check(number, answer)
    assert_names_what_broke(result, "")
    assert "KeyError: 'mine'" in result.message


def test_the_bug_of_08_3_hides_at_temperature_1():
    """The buggy verify is right at temperature 1: what the story says, and why a reader must look further."""
    result = exercises.check("08.3", answers("exercise")["buggy_verify"])
    assert result.state == "fail" and "temperature below 1" in result.message
    assert "temperature 1:" not in result.message
