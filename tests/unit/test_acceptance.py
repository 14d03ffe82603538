"""The acceptance record: its counts by hand, vLLM's counters, and arithmetic that catches contradictions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.acceptance import Acceptance
from helpers.errors import MeasurementRefused


def rounds(*pairs: tuple[int, int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(drafted=drafted, accepted=accepted) for drafted, accepted in pairs]


PAIRS = st.lists(st.integers(0, 6).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=30)


def test_counts_by_hand():
    seen = Acceptance.from_rounds(rounds((3, 3), (3, 1), (3, 0), (1, 1), (0, 0)))
    assert (seen.steps, seen.drafted, seen.accepted, seen.emitted) == (5, 10, 5, 10)
    assert seen.attempts_per_position == (4, 2, 1)  # the round of one token never got to position 1
    assert seen.accepted_per_position == (3, 1, 1)
    assert seen.per_position == (3 / 4, 1 / 2, 1.0)
    assert (seen.attempted, seen.alpha, seen.accepted_per_drafted, seen.tokens_per_pass) == (7, 5 / 7, 0.5, 2.0)
    assert list(seen.frame()["attempts"]) == [4, 2, 1]
    assert seen.row()["tokens per pass"] == 2.0


def test_rates_that_nobody_measured_are_none():
    nothing = Acceptance.from_rounds([])
    assert (nothing.alpha, nothing.accepted_per_drafted, nothing.tokens_per_pass, nothing.per_position) == (
        None,
        None,
        None,
        (),
    )
    silent = Acceptance.from_rounds(rounds((0, 0), (0, 0)))
    assert (silent.tokens_per_pass, silent.alpha, silent.emitted) == (1.0, None, 2)
    unreached = Acceptance.from_rounds(rounds((2, 0)))
    assert unreached.per_position == (0.0, None)
    for position in (1, 7):
        with pytest.raises(MeasurementRefused, match=f"position {position}"):
            unreached.interval(position)
    with pytest.raises(MeasurementRefused):
        silent.interval()


def test_accepted_over_drafted_falls_by_arithmetic():
    """Alpha 0.8 and gamma 5 give 0.54."""
    alpha, gamma, n = 0.8, 5, 100_000
    reach = [alpha**i for i in range(gamma + 1)]
    pairs = []
    for k in range(gamma + 1):
        share = reach[k] * (1 - alpha) if k < gamma else reach[k]
        pairs += [(gamma, k)] * round(n * share)
    seen = Acceptance.from_rounds(rounds(*pairs))
    assert seen.alpha == pytest.approx(alpha, abs=1e-4)
    assert seen.accepted_per_drafted == pytest.approx(0.538, abs=1e-3)
    assert seen.tokens_per_pass == pytest.approx((1 - alpha**6) / (1 - alpha), abs=1e-3)


@given(PAIRS, PAIRS)
def test_runs_add_up(a, b):
    together = Acceptance.from_rounds(rounds(*a, *b))
    assert Acceptance.from_rounds(rounds(*a)) + Acceptance.from_rounds(rounds(*b)) == together
    assert together.emitted == together.accepted + together.steps
    assert together.attempted <= together.drafted


@given(PAIRS.filter(lambda pairs: any(a for _, a in pairs)))
def test_the_interval_holds_the_rate(pairs):
    seen = Acceptance.from_rounds(rounds(*pairs))
    low, high = seen.interval()
    assert low - 1e-12 <= seen.alpha <= high + 1e-12
    for row in seen.frame().itertuples():
        assert row.low - 1e-12 <= row.rate <= row.high + 1e-12
        assert (row.low, row.high) == seen.interval(row.position)


def counters(n_drafts, drafted, *per_position, label="position={}", suffix=""):
    name = "vllm:spec_decode_num_"
    values = {f"{name}drafts{suffix}": n_drafts, f"{name}draft_tokens{suffix}": drafted}
    values[f"{name}accepted_tokens{suffix}"] = sum(per_position)
    for i, n in enumerate(per_position):
        values[f"{name}accepted_tokens_per_pos{suffix}{{{label.format(i)}}}"] = float(n)
    return values


@pytest.mark.parametrize(("label", "suffix"), [("position={}", ""), ('position="{}"', "_total")])
def test_counters_of_vllm(label, suffix):
    seen = Acceptance.from_counters(counters(10, 30, 8, 4, 1, label=label, suffix=suffix))
    assert seen.exact
    assert (seen.steps, seen.drafted, seen.accepted, seen.emitted) == (10, 30, 13, 23)
    assert seen.attempts_per_position == (10, 8, 4)
    same = Acceptance.from_rounds(rounds(*[(3, 3)], *[(3, 2)] * 3, *[(3, 1)] * 4, *[(3, 0)] * 2))
    assert seen == same


def test_counters_of_drafts_with_unknown_lengths():
    seen = Acceptance.from_counters(counters(10, 21, 8, 4, 1), emitted=40)
    assert not seen.exact
    assert (seen.steps, seen.emitted) == (27, 40)  # 17 passes without a draft
    cut = Acceptance.from_counters(
        counters(32, 128, 32, 32, 32, 32), emitted=156
    )  # four accepted tokens lie behind the ends
    assert (cut.steps, cut.emitted) == (32, 156)
    assert not (seen + seen).exact


def test_counters_of_an_engine_without_speculation():
    with pytest.raises(MeasurementRefused, match="speculative_config"):
        Acceptance.from_counters({"vllm:num_preemptions": 0.0})


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("accepted", 6),
        ("accepted_per_position", (1, 3, 1)),
        ("attempts_per_position", (4, 4, 1)),
        ("attempts_per_position", (9, 2, 1)),
        ("drafted", 4),
    ],
)
def test_counts_that_contradict_each_other_are_refused(change, value):
    sound = Acceptance.from_rounds(rounds((3, 3), (3, 1), (3, 0), (1, 1), (0, 0)))
    with pytest.raises(MeasurementRefused):
        Acceptance.model_validate({**sound.model_dump(), change: value})


def test_the_bonus_token_is_not_an_accepted_one():
    with pytest.raises(MeasurementRefused, match="own token"):
        Acceptance.from_rounds(rounds((2, 3)))


def test_positions_that_shortened_drafts_never_had_do_not_lower_alpha():
    prefix = "vllm:spec_decode_num_"
    counters = {f"{prefix}drafts": 10, f"{prefix}draft_tokens": 20, f"{prefix}accepted_tokens": 10}
    counters |= {f"{prefix}accepted_tokens_per_pos{{position={i}}}": n for i, n in enumerate((6, 4, 0, 0))}
    seen = Acceptance.from_counters(counters)
    assert seen.attempts_per_position == (10, 6) and seen.alpha == 10 / 16 and not seen.exact


def test_counters_without_positions_are_named():
    prefix = "vllm:spec_decode_num_"
    counters = {f"{prefix}drafts": 10, f"{prefix}draft_tokens": 20, f"{prefix}accepted_tokens": 10}
    with pytest.raises(MeasurementRefused, match="per_pos"):
        Acceptance.from_counters(counters)
