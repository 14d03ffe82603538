"""Percentiles that say when there are too few samples, bootstrap intervals and paired ratios."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from helpers.hardware import synchronize

T = TypeVar("T")
MIN_N = {50: 1, 90: 10, 95: 20, 99: 100}
"""The fewest samples at which the course prints a percentile: about one sample beyond it."""


class Summary(BaseModel):
    """A sample's size, mean, and those percentiles that its size allows (the others are None, shown "n too small")."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    p50_low: float | None = None
    p50_high: float | None = None


def percentile(values: Sequence[float], q: int) -> float | None:
    """The `q`-th percentile (linear interpolation), or None where there are fewer than ``MIN_N[q]`` samples."""
    if q not in MIN_N:
        raise ValueError(f"the course prints the percentiles {sorted(MIN_N)}, not {q}")
    if len(values) < MIN_N[q]:
        return None
    return float(np.percentile(np.asarray(values, dtype=float), q))


def summarize(values: Sequence[float], *, seed: int = 0, resamples: int = 1000) -> Summary:
    """Size, mean, p50 with a 95 % bootstrap interval, p95 and p99 where n allows them."""
    if not values:
        return Summary(n=0, mean=None, p50=None, p95=None, p99=None)
    low, high = bootstrap_interval(values, seed=seed, resamples=resamples)
    return Summary(
        n=len(values),
        mean=float(np.mean(values)),
        p50=percentile(values, 50),
        p95=percentile(values, 95),
        p99=percentile(values, 99),
        p50_low=low,
        p50_high=high,
    )


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Percentile-bootstrap interval of the median. One sample gives a zero-width interval: it says nothing of spread."""
    data = np.asarray(values, dtype=float)
    if data.size == 0:
        raise ValueError("no samples to resample")
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(data, size=(resamples, data.size), replace=True), axis=1)
    tail = 100 * (1 - level) / 2
    return float(np.percentile(medians, tail)), float(np.percentile(medians, 100 - tail))


class PairedRatio(BaseModel):
    """Geometric mean of ``a[i] / b[i]`` with a bootstrap interval; `undecided` where the interval holds 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n: int
    ratio: float
    low: float
    high: float

    @property
    def undecided(self) -> bool:
        return self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        return f"{self.ratio:.3f}x [{self.low:.3f}, {self.high:.3f}], n={self.n}"


def paired_ratio(
    a: Sequence[float], b: Sequence[float], *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> PairedRatio:
    """How many times `a` is `b`, pair by pair (the same request, or alternating repetitions)."""
    if len(a) != len(b) or not a:
        raise ValueError(f"paired samples must have one length, got {len(a)} and {len(b)}")
    if min(min(a), min(b)) <= 0:
        raise ValueError("ratios need positive samples")
    logs = np.log(np.asarray(a, dtype=float)) - np.log(np.asarray(b, dtype=float))
    rng = np.random.default_rng(seed)
    means = rng.choice(logs, size=(resamples, logs.size), replace=True).mean(axis=1)
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return PairedRatio(n=len(a), ratio=math.exp(logs.mean()), low=math.exp(low), high=math.exp(high))


def wilson_interval(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a proportion, for task accuracy."""
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"{successes} successes of {n}")
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def step_seconds(steps: Iterable[T], device: str = "cpu") -> tuple[list[T], list[float]]:
    """Run an iterator to its end: its items, and the seconds that each took to come, `device`'s queued work included."""
    items, seconds = [], []
    synchronize(device)
    last = time.perf_counter()
    for item in steps:
        synchronize(device)
        now = time.perf_counter()
        items.append(item)
        seconds.append(now - last)
        last = time.perf_counter()
    return items, seconds


def operator_seconds(function: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """A function's value, and the seconds of wall clock that it spent in each PyTorch operator, by the operator's name.

    What an operator calls inside counts as its own. Looking costs some microseconds a call: use the figures as shares of one
    another, and time without it. On a GPU an operator ends when its kernel is launched.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    seconds: dict[str, float] = {}

    class Clock(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            began = time.perf_counter()
            value = func(*args, **(kwargs or {}))
            name = str(func)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
            return value

    with Clock():
        value = function()
    return value, seconds
