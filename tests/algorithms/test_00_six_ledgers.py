"""Notebook 00's own code: three tools' formulas, FLOPs and bytes, percentiles of small samples, a limited client."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook_cells import answers, checked_functions

from helpers import exercises
from helpers.exercises import check
from helpers.trace import Chunk, StreamTrace

NOTEBOOK = "00_six_ledgers"
Load = Callable[..., SimpleNamespace]
Chunks = list[tuple[float, int]]
STREAM: Chunks = [(1.5, 1), (2.25, 3), (2.5, 1), (4.5, 2)]


@pytest.fixture(scope="module")
def nb(load_algorithms: Load) -> SimpleNamespace:
    return load_algorithms(NOTEBOOK)


def chunks_of(sizes: list[int], gaps: list[int]) -> Chunks:
    times = np.cumsum([1.0, *(gap / 16 for gap in gaps[: len(sizes) - 1])])
    return [(float(time), size) for time, size in zip(times, sizes, strict=True)]


# -- three tools --------------------------------------------------------------------------------------------------------
def check_vllm_tpot(nb: SimpleNamespace) -> None:
    assert nb.vllm_bench(1.0, STREAM)["TPOT"] == 3.0 / 6


def check_vllm_itl_is_a_chunk_gap(nb: SimpleNamespace) -> None:
    assert nb.vllm_bench(1.0, STREAM)["ITL"] == [0.75, 0.25, 2.0]


def check_guidellm_counts_the_first_token(nb: SimpleNamespace) -> None:
    assert nb.guidellm(1.0, STREAM)["TPOT"] == 3.5 / 7


def check_genai_perf_divides_by_the_later_chunk(nb: SimpleNamespace) -> None:
    assert nb.genai_perf(1.0, STREAM)["ITL"] == [0.25, 0.25, 1.0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=10),
    st.lists(st.integers(1, 64), min_size=10, max_size=10),
    st.integers(0, 15),
)
def relations_hold(nb: SimpleNamespace, sizes: list[int], gaps: list[int], sent: int) -> None:
    chunks = chunks_of(sizes, gaps)
    for law, (left, right) in nb.relations(sent / 16, chunks).items():
        assert left == pytest.approx(right, rel=1e-9, abs=1e-12), law


def test_relations_between_the_tools_hold_on_any_stream(nb: SimpleNamespace) -> None:
    relations_hold(nb)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=8), st.lists(st.integers(1, 64), min_size=8, max_size=8))
def agrees_with_the_trace(nb: SimpleNamespace, sizes: list[int], gaps: list[int]) -> None:
    chunks = chunks_of(sizes, gaps)
    trace = StreamTrace(
        request_id="r",
        scheduled=0.0,
        sent=0.5,
        chunks=[Chunk(time=t, n_tokens=k) for t, k in chunks],
        completion_tokens=sum(sizes),
    )
    vllm = nb.vllm_bench(0.5, chunks)
    assert vllm["TTFT"] == trace.ttft
    assert vllm["ITL"] == trace.chunk_gaps
    assert vllm["TPOT"] * (sum(sizes) - 1) == pytest.approx((trace.tpot or 0) * (sum(sizes) - sizes[0]))


def test_the_course_and_vllm_agree_up_to_the_first_chunk(nb: SimpleNamespace) -> None:
    agrees_with_the_trace(nb)


def test_one_token_has_no_tpot_and_no_itl(nb: SimpleNamespace) -> None:
    vllm, guide, genai = (tool(0.0, [(1.0, 1)]) for tool in (nb.vllm_bench, nb.guidellm, nb.genai_perf))
    assert (vllm["TPOT"], vllm["ITL"], guide["TPOT"], guide["ITL"]) == (None, [], 1.0, [])
    assert (genai["ITL"], genai["ITL in code"]) == ([], None)


# -- the roofline's counts ----------------------------------------------------------------------------------------------
def check_flops_of_a_small_llama(nb: SimpleNamespace) -> None:
    """The formula against PyTorch's counter, on a small random Llama with grouped queries and an untied head."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=101,
    )
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    head = model.lm_head.weight.numel()
    body = sum(p.numel() for name, p in model.model.named_parameters() if p.dim() == 2 and "embed" not in name)
    for batch, n_new, n_past in [(1, 9, 0), (3, 5, 0), (1, 1, 8), (4, 1, 8), (2, 3, 8)]:
        with torch.no_grad():
            past = model(torch.ones(batch, n_past, dtype=torch.long)).past_key_values if n_past else None
            with FlopCounterMode(display=False) as counter:
                model(torch.ones(batch, n_new, dtype=torch.long), past_key_values=past, logits_to_keep=1)
        assert nb.forward_flops(body, head, 2, 6, 8, batch, n_new, n_past) == counter.get_total_flops()


def check_bytes(nb: SimpleNamespace) -> None:
    weights_only = nb.forward_bytes(1000, 100, 2, 40, batch=1, n_new=0)
    assert weights_only == 2200
    assert nb.forward_bytes(1000, 100, 2, 40, batch=3, n_new=1, n_past=9) - weights_only == 3 * 10 * 40


def test_a_larger_batch_raises_the_intensity_of_decode_towards_that_of_attention(nb: SimpleNamespace) -> None:
    def intensity(batch: int) -> float:
        args = (batch, 1, 500)
        return nb.forward_flops(10**8, 10**7, 30, 9, 64, *args) / nb.forward_bytes(10**8, 10**7, 2, 23_040, *args)

    values = [intensity(batch) for batch in (1, 2, 8, 64, 4096)]
    assert values == sorted(values)
    assert 0.9 < values[0] < 1.1
    limit = (2 * 1.1e8 + 4 * 30 * 9 * 64 * 501) / (501 * 23_040)
    assert values[-1] < limit


# -- percentiles --------------------------------------------------------------------------------------------------------
def check_true_percentile(nb: SimpleNamespace) -> None:
    from scipy.stats import lognorm

    for q in (50, 95, 99):
        assert nb.true_percentile(q, 0.7) == pytest.approx(lognorm(0.7).ppf(q / 100))


def test_estimates_shrink_onto_the_truth_and_p99_of_twenty_is_too_low(nb: SimpleNamespace) -> None:
    rng = np.random.default_rng(0)
    small, large = nb.estimates(99, 20, rng), nb.estimates(99, 5000, rng, repeats=200)
    assert small.shape == (2000,)
    assert np.median(small) < 0.85 * nb.true_percentile(99)
    assert np.median(large) == pytest.approx(nb.true_percentile(99), rel=0.02)
    assert small.std() > 5 * large.std()


# -- coordinated omission -----------------------------------------------------------------------------------------------
def check_one_slot_follows_lindley(nb: SimpleNamespace) -> None:
    """With one slot the wait is Lindley's: W' = max(0, W + S - A)."""
    rng = np.random.default_rng(5)
    due, service = np.cumsum(rng.exponential(1.0, 200)).tolist(), rng.exponential(0.9, 200).tolist()
    sent, done = nb.limited_client(due, service, 1)
    wait = 0.0
    for i in range(200):
        assert sent[i] - due[i] == pytest.approx(wait)
        assert done[i] == pytest.approx(sent[i] + service[i])
        wait = max(0.0, wait + service[i] - (due[i + 1] - due[i])) if i < 199 else 0.0


def check_limit_is_kept_and_used(nb: SimpleNamespace) -> None:
    due, service = [0.0] * 7, [1.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    sent, done = nb.limited_client(due, service, 2)
    assert sent == [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 4.0]
    for moment in sent:
        assert sum(a <= moment < b for a, b in zip(sent, done, strict=True)) <= 2


def test_without_a_shortage_the_two_clocks_agree_and_a_hiccup_parts_them(nb: SimpleNamespace) -> None:
    due = [0.5 * i for i in range(40)]
    calm = [0.25] * 40
    assert nb.limited_client(due, calm, 1)[0] == due
    sent, done = nb.limited_client(due, [4.0 if i == 5 else 0.25 for i in range(40)], 1)
    from_sending, from_schedule = np.subtract(done, sent), np.subtract(done, due)
    assert (from_sending > 0.25).sum() == 1
    assert (from_schedule > 0.25).sum() > 10


CHECKS: list[Callable[[SimpleNamespace], None]] = [
    check_vllm_tpot,
    check_vllm_itl_is_a_chunk_gap,
    check_guidellm_counts_the_first_token,
    check_genai_perf_divides_by_the_later_chunk,
    check_flops_of_a_small_llama,
    check_bytes,
    check_true_percentile,
    check_one_slot_follows_lindley,
    check_limit_is_kept_and_used,
]
TWINS = [
    ("(latency - ttft) / (n - 1) if n > 1", "(latency - ttft) / n if n > 1", check_vllm_tpot),
    ("(latency - ttft) / (n - 1) if n > 1", "latency / (n - 1) if n > 1", check_vllm_tpot),
    (
        '"ITL": [b - a for (a, _), (b, _) in pairwise(chunks)]',
        '"ITL": [(b - a) / k for (a, _), (b, k) in pairwise(chunks)]',
        check_vllm_itl_is_a_chunk_gap,
    ),
    ('"TPOT": (last - sent) / n', '"TPOT": (last - first) / n', check_guidellm_counts_the_first_token),
    (
        "[(b - a) / k for (a, _), (b, k) in pairwise(chunks)]",
        "[(b - a) / k for (a, k), (b, _) in pairwise(chunks)]",
        check_genai_perf_divides_by_the_later_chunk,
    ),
    ("2 * batch * (n_body * n_new + n_head)", "2 * batch * (n_body + n_head) * n_new", check_flops_of_a_small_llama),
    ("n_new * (n_past + n_new)", "n_new * n_past", check_flops_of_a_small_llama),
    ("batch * (n_past + n_new) * kv_bytes_per_token", "(n_past + n_new) * kv_bytes_per_token", check_bytes),
    ("np.exp(sigma * NormalDist()", "np.exp(NormalDist()", check_true_percentile),
    ("max(want, free[slot])", "want", check_one_slot_follows_lindley),
    ("slot = min(range(limit), key=free.__getitem__)", "slot = 0", check_limit_is_kept_and_used),
]


@pytest.mark.parametrize("check_one", CHECKS, ids=lambda f: f.__name__)
def test_algorithm(check_one: Callable[[SimpleNamespace], None], nb: SimpleNamespace) -> None:
    check_one(nb)


@pytest.mark.parametrize(("old", "new", "red"), TWINS, ids=lambda v: getattr(v, "__name__", None))
def test_broken_twin_turns_red(
    old: str, new: str, red: Callable[[SimpleNamespace], None], load_algorithms: Load
) -> None:
    twin = load_algorithms(NOTEBOOK, (old, new))
    with pytest.raises(AssertionError):
        red(twin)


# -- exercises ----------------------------------------------------------------------------------------------------------
NAMES = checked_functions(NOTEBOOK)


@pytest.fixture(scope="module")
def solutions() -> SimpleNamespace:
    return SimpleNamespace(**answers(NOTEBOOK, "solution"))


@pytest.fixture(scope="module")
def stubs() -> SimpleNamespace:
    return SimpleNamespace(**answers(NOTEBOOK, "exercise"))


def with_empty_chunks(sent: float, chunks: Chunks) -> dict[str, Any]:
    n = sum(k for _, k in chunks)
    first, last = chunks[0][0], chunks[-1][0]
    itl = [(b - a) / max(k, 1) for (a, _), (b, k) in pairwise(chunks) for _ in range(k)]
    return {"ttft": first - sent, "tpot": (last - first) / (n - chunks[0][1]) if n > chunks[0][1] else None, "itl": itl}


def n_minus_one(sent: float, chunks: Chunks) -> dict[str, Any]:
    held = [(t, k) for t, k in chunks if k]
    n = sum(k for _, k in held)
    itl = [(b - a) / k for (a, _), (b, k) in pairwise(held) for _ in range(k)]
    return {"ttft": held[0][0] - sent, "tpot": (held[-1][0] - held[0][0]) / (n - 1), "itl": itl}


def chunk_gaps(sent: float, chunks: Chunks) -> dict[str, Any]:
    right = n_minus_one(sent, chunks)
    held = [(t, k) for t, k in chunks if k]
    later = sum(k for _, k in held[1:])
    right["tpot"] = (held[-1][0] - held[0][0]) / later if later else None
    right["itl"] = [b - a for (a, _), (b, _) in pairwise(held)]
    return right


def goodput_with(
    ttft: Callable[[dict], float] = lambda r: r["first"] - r["scheduled"],
    *,
    failed: bool = False,
    gaps: Callable[[int], int] = lambda n: n - 1,
    strict: str = "",
    one_token: bool = True,
    slow: str = "",
) -> Callable[..., float]:
    def answer(requests: list[dict], slo_ttft: float, slo_tpot: float, makespan: float) -> float:
        good = 0
        for r in requests:
            if r["first"] is None or not (r["ok"] or failed):
                continue
            late = ttft(r) >= slo_ttft if strict == "ttft" else ttft(r) > slo_ttft
            if late and slow != "ttft":
                continue
            if r["n"] <= 1:
                good += one_token
                continue
            tpot = (r["last"] - r["first"]) / gaps(r["n"])
            good += slow == "tpot" or (tpot < slo_tpot if strict == "tpot" else tpot <= slo_tpot)
        return good / makespan

    return answer


def raw_intensity(
    n_weights: float, weight_bytes: float, kv_bytes: float, attention_flops: float, context: int, ridge: float
) -> int:
    return int(np.ceil(ridge * weight_bytes / 2))


def no_way_out(
    n_weights: float, weight_bytes: float, kv_bytes: float, attention_flops: float, context: int, ridge: float
) -> int:
    return int(
        np.ceil(
            ridge * n_weights * weight_bytes / (2 * n_weights + attention_flops * context - ridge * context * kv_bytes)
        )
    )


def capped_search(n_weights, weight_bytes, kv_bytes, attention_flops, context, ridge, cap=200):
    for batch in range(1, cap + 1):
        flops = batch * (2 * n_weights + attention_flops * context)
        if flops >= ridge * (n_weights * weight_bytes + batch * context * kv_bytes):
            return batch
    return None


def float_batch(n_weights, weight_bytes, kv_bytes, attention_flops, context, ridge):
    gain = 2 * n_weights + attention_flops * context - ridge * context * kv_bytes
    return None if gain <= 0 else max(1.0, float(np.ceil(ridge * n_weights * weight_bytes / gain)))


def n_minus_one_tpot(chunks: Chunks) -> float | None:
    held = [(t, k) for t, k in chunks if k]
    n = sum(k for _, k in held)
    return (held[-1][0] - held[0][0]) / (n - 1) if len(held) > 1 else None


def divides_by_zero(chunks: Chunks) -> float:
    held = [(t, k) for t, k in chunks if k]
    return (held[-1][0] - held[0][0]) / sum(k for _, k in held[1:])


WRONG: list[tuple[str, Any, str]] = [
    ("00.1", with_empty_chunks, "first chunk that holds a token"),
    ("00.1", n_minus_one, "only the tokens after the first chunk"),
    ("00.1", chunk_gaps, "one value for each token"),
    ("00.1", lambda sent, chunks: (0.1, 0.2, []), "a dict with the keys"),
    ("00.2", goodput_with(lambda r: r["first"] - r["sent"]), "waited inside the client"),
    ("00.2", goodput_with(failed=True), "broke half way"),
    ("00.2", goodput_with(gaps=lambda n: n), "n - 1 tokens"),
    ("00.2", goodput_with(strict="ttft"), "a TTFT of exactly the limit"),
    ("00.2", goodput_with(strict="tpot"), "a TPOT of exactly the limit"),
    ("00.2", goodput_with(one_token=False), "a one-token request"),
    ("00.2", goodput_with(slow="tpot"), "a slow TPOT"),
    ("00.2", goodput_with(lambda r: r["sent"] - r["scheduled"]), "a slow TTFT"),
    ("00.2", lambda r, *_: goodput_with()(r, 1.0, 0.2, 2.0), "those given"),
    ("00.2", lambda r, a, b, c: sum(x["first"] + x["n"] > 0 for x in r), "requests that meet both limits"),
    ("00.2", lambda requests, slo_ttft, slo_tpot, makespan: len(requests) / makespan, "waited inside the client"),
    ("00.3", "tpot_with_a_bug", "without tokens moves nothing"),
    (
        "00.3",
        lambda chunks: (chunks[-1][0] - chunks[0][0]) / (sum(k for _, k in chunks) - 1),
        "without tokens moves nothing",
    ),
    ("00.3", lambda chunks: 0.25 if len(chunks) > 2 else None, "the tokens after the first chunk"),
    ("00.3", n_minus_one_tpot, "several tokens in the first chunk, as it came"),
    ("00.3", n_minus_one_tpot, "shared by the tokens after the first chunk"),
    ("00.3", divides_by_zero, "TPOT is None where no token follows"),
    ("00.3", lambda chunks: n_minus_one_tpot(chunks) if len(chunks) > 2 else None, "None"),
    ("00.4", raw_intensity, "smallest batch"),
    ("00.4", no_way_out, "None"),
    ("00.4", lambda *machine: 1, "smallest batch"),
    ("00.4", capped_search, "smallest batch"),
    ("00.4", float_batch, "a batch is an int"),
    ("00.4", lambda *machine: None if machine[4] else float_batch(*machine), "a batch is an int"),
    ("00.5", lambda: ([10] * 4, [10] * 4), "one by one wins the second"),
    ("00.5", lambda: ([10] * 4, [40]), "as many requests"),
    ("00.5", lambda: ([10] * 4, [50, 1, 1, 1]), "as many tokens"),
    ("00.5", lambda: ([10] * 4, [40, 0, 0, 0]), "at least one token"),
    ("00.5", lambda: 3, "pair of lists"),
    ("00.5", lambda: ([10] * 4, [37.9, 1, 1, 1.9]), "a whole number of tokens"),
    ("00.5", lambda: ([10] * 4, ["37", "1", "1", "1"]), "pair of lists"),
    ("00.5", lambda: ([10] * 4, [math.inf, 1, 1, 1]), "a whole number of tokens"),
    ("00.5", 3, "the answer is a function"),
]


@pytest.mark.parametrize(
    ("exercise", "answer", "message"), WRONG, ids=[f"{e}-{i}" for i, (e, _, _) in enumerate(WRONG)]
)
def test_wrong_answer_fails_with_the_property_it_breaks(
    exercise: str, answer: Any, message: str, stubs: SimpleNamespace
) -> None:
    result = check(exercise, getattr(stubs, answer) if isinstance(answer, str) else answer)
    assert result.state == "fail"
    assert message in result.message


def answer_or(right: Callable[..., Any], after: int, value: Any = None) -> Callable[..., Any]:
    """`right` for the first `after` calls, then `value`."""
    calls = iter(range(10**6))
    return lambda *given: right(*given) if next(calls) < after else value


@pytest.mark.parametrize("value", [None, ...])
@pytest.mark.parametrize("exercise", ["00.1", "00.2", "00.3", "00.4"])
def test_nothing_for_some_inputs_is_a_failure_and_for_all_not_attempted(
    exercise: str, value: Any, solutions: SimpleNamespace
) -> None:
    result = check(exercise, answer_or(getattr(solutions, NAMES[exercise]), 1, value))
    assert result.state == "fail"
    assert "input: " in result.message and f"got:      {value!r}" in result.message
    assert check(exercise, lambda *_: value).state == "not attempted"


@pytest.mark.parametrize("exercise", NAMES)
def test_an_error_in_an_answer_shows_its_input(exercise: str) -> None:
    def broken(*given: Any) -> None:
        raise KeyError("prefill")

    result = check(exercise, broken)
    assert result.state == "fail"
    assert "KeyError: 'prefill'" in result.message
    assert {"00.1": "sent=1.0", "00.2": "'scheduled'", "00.3": "(1.5, 1)", "00.4": "'ridge': 8", "00.5": "rank_swap()"}[
        exercise
    ] in result.message


RIGHT: list[tuple[str, Callable[[SimpleNamespace], Any]]] = [
    ("00.1", lambda s: lambda a, b: {**s.metrics(a, b), "n": len(b)}),
    ("00.1", lambda s: lambda a, b: {**s.metrics(a, b), "itl": np.array(s.metrics(a, b)["itl"])}),
    ("00.2", lambda s: lambda rs, ttft, tpot, seconds: s.goodput(rs, ttft, tpot, seconds)),
    ("00.3", lambda s: lambda stream: s.tpot_fixed(stream)),
    ("00.4", lambda s: lambda *m: None if (b := s.smallest_batch_at_ridge(*m)) is None else np.int64(b)),
    ("00.4", lambda s: lambda *m: capped_search(*m, cap=20_000)),
    ("00.5", lambda s: lambda: (np.array([10] * 4), (37.0, 1, 1, 1))),
]


@pytest.mark.parametrize(("exercise", "make"), RIGHT, ids=[f"{e}-{i}" for i, (e, _) in enumerate(RIGHT)])
def test_right_answers_of_another_form_pass(
    exercise: str, make: Callable[[SimpleNamespace], Any], solutions: SimpleNamespace
) -> None:
    assert check(exercise, make(solutions)).state == "pass"


def endless(*given: Any) -> None:
    while True:
        pass


def swallowing(*given: Any) -> None:
    try:
        endless()
    except Exception:
        return


@pytest.mark.parametrize("answer", [endless, swallowing])
def test_an_endless_answer_is_stopped_and_the_outer_timer_goes_on(
    answer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exercises, "TIME_LIMIT_S", 0.2)
    outer = signal.signal(signal.SIGALRM, handler := lambda *_: None)
    timer = signal.setitimer(signal.ITIMER_REAL, 300.0)
    try:
        result = check("00.3", answer)
        assert result.state == "fail"
        assert result.message.startswith("Your code ran for more than 0.2 s.")
        assert "(1.5, 1)" in result.message
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 300.0 - 0.2
    finally:
        signal.signal(signal.SIGALRM, outer)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_in_another_thread_there_is_no_limit(monkeypatch: pytest.MonkeyPatch, solutions: SimpleNamespace) -> None:
    monkeypatch.setattr(exercises, "TIME_LIMIT_S", 0.05)
    results = []

    def slow(chunks: Chunks) -> float | None:
        time.sleep(0.01)
        return solutions.tpot_fixed(chunks)

    thread = threading.Thread(target=lambda: results.append(check("00.3", slow)))
    thread.start()
    thread.join()
    assert [r.state for r in results] == ["pass"]
