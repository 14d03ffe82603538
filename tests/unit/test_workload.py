"""Workloads: absolute arrivals, prompts that never repeat by accident, and a digest that tells two workloads apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from helpers import workload as w
from helpers.errors import EngineError, UnknownNameError


def make(**changes: Any) -> w.Workload:
    given: dict[str, Any] = {"n_requests": 6, "max_model_len": 512, "vocab_size": 5000, "seed": 3}
    return w.make_workload(changes.pop("length_class", "short-short"), **{**given, **changes})


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_equal_arguments_give_equal_workloads_and_another_seed_another() -> None:
    assert make() == make()
    assert make().digest == make().digest
    assert make(seed=4).digest != make().digest


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.model_copy(update={"concurrency": 2}),
        lambda x: x.model_copy(update={"kind": "open"}),
        lambda x: x.model_copy(update={"cache": "any"}),
        lambda x: x.model_copy(update={"requests": x.requests[::-1]}),
        lambda x: x.model_copy(update={"requests": x.requests[:-1]}),
        lambda x: x.model_copy(update={"requests": (one(x, arrival=1.0), *x.requests[1:])}),
        lambda x: x.model_copy(update={"requests": (one(x, max_tokens=1), *x.requests[1:])}),
        lambda x: x.model_copy(update={"requests": (one(x, temperature=0.7), *x.requests[1:])}),
        lambda x: x.model_copy(update={"requests": (one(x, prompt_ids=(1, 2)), *x.requests[1:])}),
    ],
)
def test_every_difference_in_what_is_asked_changes_the_digest(change: Callable[[w.Workload], w.Workload]) -> None:
    assert change(make()).digest != make().digest


def one(workload: w.Workload, **update: Any) -> w.Request:
    return workload.requests[0].model_copy(update=update)


def test_a_note_does_not_change_the_digest() -> None:
    assert make().model_copy(update={"note": "measured on a quiet evening"}).digest == make().digest


def test_the_digest_survives_json() -> None:
    again = w.Workload.model_validate_json(make(rate=2.0).model_dump_json())
    assert again.digest == make(rate=2.0).digest


def test_no_two_workers_share_a_first_block() -> None:
    starts = [r.prompt_ids[:8] for worker in range(4) for r in make(n_requests=32, worker=worker).requests]
    assert len(set(starts)) == len(starts) == 128


def test_prompts_of_text_differ_in_their_first_block_too() -> None:
    text = list(range(100, 400))
    starts = [r.prompt_ids[:8] for r in make(n_requests=64, text_ids=text).requests]
    assert len(set(starts)) == 64


def test_a_shared_prefix_is_shared_by_all_and_only_as_long_as_said() -> None:
    work = make(shared_prefix_tokens=20, n_requests=16)
    assert len({r.prompt_ids[:20] for r in work.requests}) == 1
    assert len({r.prompt_ids[20:28] for r in work.requests}) == 16
    assert work.cache == "any"
    assert make().cache == "cold"


def test_arrivals_are_absolute_and_set_before_anything_runs() -> None:
    work = make(rate=5.0, n_requests=20)
    arrivals = [r.arrival for r in work.requests]
    assert work.kind == "open"
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert arrivals == [r.arrival for r in make(rate=5.0, n_requests=20).requests]
    assert work.offered_rate == pytest.approx(19 / arrivals[-1])


def test_arrivals_at_double_the_rate_are_the_same_gaps_halved() -> None:
    slow, fast = w.gamma_arrivals(50, 2.0, 0.5, rng()), w.gamma_arrivals(50, 4.0, 0.5, rng())
    assert fast == pytest.approx([t / 2 for t in slow])


def test_lengths_do_not_depend_on_whether_arrivals_were_drawn_for_another_rate() -> None:
    assert make(rate=1.0).prompt_lengths == make(rate=9.0).prompt_lengths


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(burstiness: float) -> None:
    gaps = np.diff(w.gamma_arrivals(40_000, 8.0, burstiness, rng(1)))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_is_burstiness_one() -> None:
    assert w.poisson_arrivals(10, 3.0, rng()) == w.gamma_arrivals(10, 3.0, 1.0, rng())


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_rates_must_be_positive(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        w.gamma_arrivals(3, rate, burstiness, rng())


def test_a_closed_workload_has_no_rate_of_its_own() -> None:
    assert make().offered_rate is None


@pytest.mark.parametrize("length_class", list(w.CLASSES))
def test_every_class_fits_the_context_it_was_made_for(length_class: str) -> None:
    make(length_class=length_class, n_requests=64).check_fits(512)


def test_an_unknown_class_is_named_with_the_closest() -> None:
    with pytest.raises(UnknownNameError, match="short-shot") as error:
        make(length_class="short-shot")
    assert "short-short" in error.value.remedy


def test_check_fits_names_the_request_and_its_lengths() -> None:
    work = w.single(range(1, 101), 30, name="too-long")
    work.check_fits(130)
    with pytest.raises(EngineError) as error:
        work.check_fits(129)
    for part in ("'too-long'", "130 positions", "100 prompt", "30", "129"):
        assert part in error.value.symptom
    assert error.value.remedy


def test_workloads_that_make_no_sense_are_refused() -> None:
    request = w.Request(request_id="a", prompt_ids=(1,), max_tokens=1)
    with pytest.raises(ValidationError, match="repeat"):
        w.Workload(name="twice", requests=(request, request))
    with pytest.raises(ValidationError, match="no requests"):
        w.Workload(name="none", requests=())
    with pytest.raises(ValidationError, match="empty"):
        w.Request(request_id="a", prompt_ids=(), max_tokens=1)


def test_turns_of_a_session_grow_by_their_own_tokens_only() -> None:
    work = w.agent_sessions(n_sessions=2, n_turns=3, turn_tokens=5, max_tokens=4, vocab_size=999)
    mine = [r.prompt_ids for r in work.requests if r.session == "session1"]
    assert [len(p) for p in mine] == [5, 10, 15]
    assert mine[2][:10] == mine[1]
    assert mine[0] != work.requests[0].prompt_ids


def test_replay_keeps_arrivals_and_lengths() -> None:
    work = w.replay("trace", [(0.5, 3, 2), (2.0, 4, 1)], lambda index, n: tuple(range(index, index + n)))
    assert [(r.arrival, len(r.prompt_ids), r.max_tokens) for r in work.requests] == [(0.5, 3, 2), (2.0, 4, 1)]
    assert work.kind == "open"


def test_random_prompts_leave_the_special_ids_alone() -> None:
    assert min(w.random_prompt(5000, 200, rng())) >= 64
