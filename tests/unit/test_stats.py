"""Percentiles that refuse small samples, and intervals that hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from helpers import stats


@pytest.mark.parametrize(("q", "floor"), [(50, 1), (90, 10), (95, 20), (99, 100)])
def test_a_percentile_has_a_floor_on_n(q: int, floor: int) -> None:
    assert stats.percentile([1.0] * (floor - 1), q) is None
    assert stats.percentile([1.0] * floor, q) == 1.0


def test_percentiles_interpolate_linearly() -> None:
    values = [float(i) for i in range(101)]
    assert [stats.percentile(values[::-1], q) for q in (50, 95, 99)] == [50.0, 95.0, 99.0]
    assert stats.percentile([1.0, 2.0], 50) == 1.5


def test_a_percentile_that_the_course_does_not_print_is_an_error() -> None:
    with pytest.raises(ValueError, match="75"):
        stats.percentile([1.0], 75)


def test_summary_of_few_samples_leaves_the_tail_out() -> None:
    small, large = stats.summarize([1.0, 2.0, 4.0]), stats.summarize([float(i) for i in range(100)])
    assert (small.n, small.mean, small.p50, small.p95, small.p99) == (3, 7 / 3, 2.0, None, None)
    assert large.p95 == pytest.approx(94.05)
    assert large.p99 == pytest.approx(98.01)
    assert small.p50_low is not None and small.p50_high is not None
    assert small.p50_low <= 2.0 <= small.p50_high


def test_summary_of_nothing() -> None:
    empty = stats.summarize([])
    assert (empty.n, empty.mean, empty.p50, empty.p50_low) == (0, None, None, None)


def test_bootstrap_is_seeded_and_refuses_nothing_to_resample() -> None:
    values = [1.0, 5.0, 2.0, 9.0]
    assert stats.bootstrap_interval(values, seed=1) == stats.bootstrap_interval(values, seed=1)
    assert stats.bootstrap_interval([3.0]) == (3.0, 3.0)
    with pytest.raises(ValueError, match="no samples"):
        stats.bootstrap_interval([])


def test_the_bootstrap_interval_covers_the_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for index in range(200):
        low, high = stats.bootstrap_interval(rng.lognormal(0, 0.5, 40).tolist(), resamples=300, seed=index)
        held += low <= 1.0 <= high
    assert 0.88 <= held / 200 <= 0.99


def test_intervals_narrow_with_n() -> None:
    rng = np.random.default_rng(0)
    widths = []
    for n in (10, 1000):
        low, high = stats.bootstrap_interval(rng.lognormal(0, 0.5, n).tolist())
        widths.append(high - low)
    assert widths[1] < widths[0] / 3


def test_a_paired_ratio_sees_a_constant_factor_through_any_spread() -> None:
    b = [0.01, 1.0, 50.0, 0.3]
    ratio = stats.paired_ratio([2 * x for x in b], b)
    assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert not ratio.undecided
    assert "2.000x" in str(ratio) and "n=4" in str(ratio)


def test_a_paired_ratio_is_a_geometric_mean_and_its_inverse_inverts() -> None:
    forth, back = stats.paired_ratio([2.0, 8.0], [1.0, 1.0]), stats.paired_ratio([1.0, 1.0], [2.0, 8.0])
    assert forth.ratio == pytest.approx(4.0)
    assert forth.ratio * back.ratio == pytest.approx(1.0)


def test_noise_alone_is_undecided_about_as_often_as_promised() -> None:
    rng = np.random.default_rng(1)
    undecided = 0
    for index in range(200):
        a, b = rng.lognormal(0, 0.3, (2, 30)).tolist()
        undecided += stats.paired_ratio(a, b, resamples=300, seed=index).undecided
    assert 0.86 <= undecided / 200 <= 0.99


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0, 2.0]), ([], [])])
def test_pairs_must_pair(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="one length"):
        stats.paired_ratio(a, b)


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_ratios_need_positive_samples(bad: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        stats.paired_ratio([1.0, bad], [1.0, 1.0])


@pytest.mark.parametrize(("successes", "n"), [(0, 8), (8, 8), (3, 10), (97, 100), (1, 1)])
def test_wilson_agrees_with_scipy(successes: int, n: int) -> None:
    reference = binomtest(successes, n).proportion_ci(method="wilson")
    assert stats.wilson_interval(successes, n) == pytest.approx((reference.low, reference.high), abs=1e-4)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_what_is_no_proportion(successes: int, n: int) -> None:
    with pytest.raises(ValueError):
        stats.wilson_interval(successes, n)


def test_step_seconds_times_each_item() -> None:
    items, seconds = stats.step_seconds(iter("abc"))
    assert items == ["a", "b", "c"]
    assert len(seconds) == 3 and min(seconds) >= 0


def test_operator_seconds_names_the_operators_that_ran_and_keeps_the_value() -> None:
    a = torch.ones(64, 64)
    with torch.inference_mode():
        value, seconds = stats.operator_seconds(lambda: float(torch.nn.functional.linear(a, a).sum()))
    assert value == 64.0**3
    assert seconds["aten.sum.default"] > 0 and any("mm" in name or "linear" in name for name in seconds)
    assert not any("conv" in name for name in seconds)
