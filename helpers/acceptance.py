"""What became of drafted tokens: one record for every kind of speculation, so that no bare "acceptance rate" goes about.

A *round* is one target pass: some tokens were drafted for it, the first few of them were accepted, and the target added one of
its own. Position 0 is the first drafted token. A position is *reached* where a token was drafted for it and all before it were
accepted; only then was the target asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Protocol

import pandas as pd
from pydantic import BaseModel, ConfigDict, model_validator

from helpers.errors import MeasurementRefused
from helpers.stats import wilson_interval


class RoundLike(Protocol):
    """Anything that knows how many tokens a target pass was given, and how many it accepted."""

    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int: ...


class Acceptance(BaseModel):
    """Counts of a run's rounds. They add up: ``a + b`` is both runs together."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int
    """Target passes, those without a draft included where the source counts them."""
    drafted: int
    accepted: int
    emitted: int
    """Tokens that came out: the accepted ones, and the target's own one in each pass."""
    attempts_per_position: tuple[int, ...]
    """How often each position was reached."""
    accepted_per_position: tuple[int, ...]
    exact: bool = True
    """False where drafts were of different lengths and the source does not say how long: then `attempts_per_position` is an
    upper bound from the second position on, and rates that use it are lower bounds."""

    @model_validator(mode="after")
    def _counts_agree(self) -> Acceptance:
        pairs = list(zip(self.accepted_per_position, self.attempts_per_position, strict=True))
        reached = [self.steps, *self.accepted_per_position]
        if (
            any(not 0 <= got <= tried for got, tried in pairs)
            or any(tried > before for (_, tried), before in zip(pairs, reached, strict=False))
            or sum(self.accepted_per_position) != self.accepted
            or self.accepted > self.drafted
        ):
            raise MeasurementRefused(
                f"These acceptance counts contradict each other: {self!r}.", "Count the rounds of one run, all of them."
            )
        return self

    # -- where they come from -------------------------------------------------------------------------------------
    @classmethod
    def from_rounds(cls, rounds: Iterable[RoundLike]) -> Acceptance:
        """Count rounds, each with the attributes ``drafted`` and ``accepted``; drafts may have any length, 0 included."""
        pairs = [(int(r.drafted), int(r.accepted)) for r in rounds]
        for drafted, accepted in pairs:
            if not 0 <= accepted <= drafted:
                raise MeasurementRefused(
                    f"A round accepted {accepted} of {drafted} drafted tokens.", "Do not count the target's own token."
                )
        longest = max((drafted for drafted, _ in pairs), default=0)
        accepted = sum(a for _, a in pairs)
        return cls(
            steps=len(pairs),
            drafted=sum(d for d, _ in pairs),
            accepted=accepted,
            emitted=accepted + len(pairs),
            attempts_per_position=tuple(sum(d > i and a >= i for d, a in pairs) for i in range(longest)),
            accepted_per_position=tuple(sum(a > i for _, a in pairs) for i in range(longest)),
        )

    @classmethod
    def from_counters(cls, counters: Mapping[str, float], emitted: int | None = None) -> Acceptance:
        """Read vLLM's ``vllm:spec_decode_*`` counters (differences over a run).

        Parameters
        ----------
        counters : names to values; positions as ``vllm:spec_decode_num_accepted_tokens_per_pos{position=0}``.
        emitted : tokens generated in the run, if known. vLLM counts only passes with a draft; the others are then known too,
            but for the last drafts of answers, of which it also counts as accepted what lies behind the end.

        Raises
        ------
        MeasurementRefused : the counters are not there: the engine ran without speculation, or its statistics were off.
        """
        prefix = "vllm:spec_decode_num_"
        plain = {name.removesuffix("_total"): value for name, value in counters.items()}
        wanted = [prefix + name for name in ("drafts", "draft_tokens", "accepted_tokens")]
        if missing := [name for name in wanted if name not in plain]:
            raise MeasurementRefused(
                f"There is no counter {missing[0]}.",
                "Start vLLM with a speculative_config, and with its statistics on.",
            )
        n_drafts, drafted, accepted = (round(plain[name]) for name in wanted)
        pattern = re.compile(re.escape(prefix) + r'accepted_tokens_per_pos(?:_total)?\{position="?(\d+)"?\}')
        found = {int(m.group(1)): round(v) for name, v in counters.items() if (m := pattern.fullmatch(name))}
        if not found and accepted:
            raise MeasurementRefused(
                f"There is no counter {prefix}accepted_tokens_per_pos.", "Give all of vLLM's counters, by position too."
            )
        per_position = tuple(found.get(i, 0) for i in range(max(found, default=-1) + 1))
        exact = drafted == n_drafts * len(per_position)
        usual = drafted // n_drafts if n_drafts else 0
        if usual * n_drafts == drafted and not any(per_position[usual:]):
            per_position = per_position[:usual]  # the engine may draft more than it did: nobody got to those positions
        return cls(
            steps=n_drafts if emitted is None else max(n_drafts, emitted - accepted),
            drafted=drafted,
            accepted=accepted,
            emitted=accepted + n_drafts if emitted is None else emitted,
            attempts_per_position=(n_drafts, *per_position)[: len(per_position)],
            accepted_per_position=per_position,
            exact=exact,
        )

    def __add__(self, other: Acceptance) -> Acceptance:
        def added(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))

        return Acceptance(
            steps=self.steps + other.steps,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            emitted=self.emitted + other.emitted,
            attempts_per_position=added(self.attempts_per_position, other.attempts_per_position),
            accepted_per_position=added(self.accepted_per_position, other.accepted_per_position),
            exact=self.exact and other.exact,
        )

    # -- what they say --------------------------------------------------------------------------------------------
    @property
    def attempted(self) -> int:
        """Drafted tokens that the target was asked about: those behind a rejected one were not."""
        return sum(self.attempts_per_position)

    @property
    def alpha(self) -> float | None:
        """Accepted over attempted; None where nothing was. If all tokens were alike, its most likely acceptance rate."""
        return self.accepted / self.attempted if self.attempted else None

    @property
    def accepted_per_drafted(self) -> float | None:
        """Accepted over drafted. It falls as drafts get longer, whatever the draft: tokens behind a rejection count as well."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def per_position(self) -> tuple[float | None, ...]:
        """The share accepted at each position, of those that reached it; None where none did."""
        pairs = zip(self.accepted_per_position, self.attempts_per_position, strict=True)
        return tuple(got / tried if tried else None for got, tried in pairs)

    @property
    def tokens_per_pass(self) -> float | None:
        """Emitted over target passes: what speculation is for."""
        return self.emitted / self.steps if self.steps else None

    def interval(self, position: int | None = None) -> tuple[float, float]:
        """95 % Wilson interval of the rate at `position`, or of alpha. Rounds of one text are not quite independent.

        Raises
        ------
        MeasurementRefused : that position was never reached.
        """
        got, tried = self.accepted, self.attempted
        if position is not None:
            known = position < len(self.attempts_per_position)
            got = self.accepted_per_position[position] if known else 0
            tried = self.attempts_per_position[position] if known else 0
        if not tried:
            raise MeasurementRefused(
                f"No drafted token reached {'any position' if position is None else f'position {position}'}.",
                "Look at a position that was reached, or run longer.",
            )
        return wilson_interval(got, tried)

    def row(self) -> dict[str, float | int | None]:
        """The counts and the three rates, flat, for a table."""
        return {
            "passes": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "alpha": self.alpha,
            "accepted/drafted": self.accepted_per_drafted,
            "tokens per pass": self.tokens_per_pass,
        }

    def frame(self) -> pd.DataFrame:
        """One row for each position that was reached: attempts, accepted, rate, and its interval's ends low and high."""
        rows = []
        for position, (got, tried) in enumerate(
            zip(self.accepted_per_position, self.attempts_per_position, strict=True)
        ):
            if tried:
                low, high = wilson_interval(got, tried)
                rows.append(
                    {
                        "position": position,
                        "attempts": tried,
                        "accepted": got,
                        "rate": got / tried,
                        "low": low,
                        "high": high,
                    }
                )
        return pd.DataFrame(rows, columns=["position", "attempts", "accepted", "rate", "low", "high"])
