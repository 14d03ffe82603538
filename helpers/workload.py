"""What is asked of an engine, and when: `Request`, length distributions, arrivals, and the course's standard workloads.

Arrival times are absolute offsets in seconds from the start of a run, drawn once from the seed, so that a slow client
cannot stretch the schedule. Every prompt starts with an identifier drawn from ``hash(seed, worker, index)``: two requests
share a prefix only where the workload says so (``shared_prefix_tokens``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from helpers.errors import EngineError, UnknownNameError, suggest

ArrivalKind = Literal["closed", "open"]


class Request(BaseModel):
    """One request: token ids in, at most `max_tokens` out, due `arrival` seconds after the run starts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int = Field(ge=1)
    arrival: float = Field(default=0.0, ge=0.0)
    temperature: float = Field(default=0.0, ge=0.0)
    ignore_eos: bool = True
    seed: int | None = None
    session: str | None = None

    @model_validator(mode="after")
    def _has_a_prompt(self) -> Request:
        if not self.prompt_ids:
            raise ValueError(f"request {self.request_id}: the prompt is empty")
        return self


class Workload(BaseModel):
    """A list of requests and the rule by which they are sent.

    ``closed``: `concurrency` requests are in flight and the next is due when one ends; arrivals are ignored.
    ``open``: each request is due at its own arrival time, whether or not the engine keeps up.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    requests: tuple[Request, ...]
    kind: ArrivalKind = "closed"
    concurrency: int = Field(default=1, ge=1)
    seed: int = 0
    cache: Literal["cold", "warm", "any"] = "cold"
    """Whether the reader may assume that no prompt's prefix was cached before. A run that breaks this is refused."""
    shared_prefix_tokens: int = 0
    note: str = ""

    @model_validator(mode="after")
    def _ids_are_unique(self) -> Workload:
        if not self.requests:
            raise ValueError(f"workload {self.name}: it has no requests")
        if len({request.request_id for request in self.requests}) != len(self.requests):
            raise ValueError(f"workload {self.name}: request ids repeat")
        return self

    @property
    def digest(self) -> str:
        """Twelve hex digits that two runs share exactly when they were asked the same things at the same times."""
        body = self.model_dump(mode="json", exclude={"note"})
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(request.prompt_ids) for request in self.requests]

    @property
    def output_lengths(self) -> list[int]:
        return [request.max_tokens for request in self.requests]

    @property
    def offered_rate(self) -> float | None:
        """Requests per second that an open workload asks for; None for a closed one (it has no rate of its own)."""
        if self.kind == "closed" or len(self.requests) < 2:
            return None
        arrivals = [request.arrival for request in self.requests]
        span = max(arrivals) - min(arrivals)
        return (len(arrivals) - 1) / span if span > 0 else None

    def check_fits(self, max_model_len: int) -> None:
        """Raise `EngineError` naming the first request that does not fit a context of `max_model_len` tokens."""
        for request in self.requests:
            total = len(request.prompt_ids) + request.max_tokens
            if total > max_model_len:
                raise EngineError(
                    f"Request {request.request_id!r} needs {total} positions ({len(request.prompt_ids)} prompt + "
                    f"{request.max_tokens} output), and the engine's context holds {max_model_len}.",
                    "Shorten the prompt, ask for fewer tokens, or start the engine with a larger max_model_len.",
                )


# -- arrivals -----------------------------------------------------------------------------------------------------------
def poisson_arrivals(n: int, rate: float, rng: np.random.Generator) -> list[float]:
    """`n` absolute arrival times, seconds, of a Poisson process with `rate` requests per second."""
    return gamma_arrivals(n, rate, 1.0, rng)


def gamma_arrivals(n: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """`n` absolute arrival times whose gaps are gamma distributed with mean ``1/rate``.

    `burstiness` is the gamma shape, as in ``vllm bench serve``: 1 is Poisson, below 1 is burstier, above 1 more regular.
    The coefficient of variation of the gaps is ``1/sqrt(burstiness)``.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"rate and burstiness must be positive, got rate={rate}, burstiness={burstiness}")
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=n)
    return [float(t) for t in np.cumsum(gaps) - gaps[0]]


# -- prompts ------------------------------------------------------------------------------------------------------------
def _request_rng(seed: int, worker: int, index: int) -> np.random.Generator:
    """A generator of its own for each (seed, worker, index), so that workers never repeat each other's prompts."""
    material = hashlib.sha256(f"{seed}/{worker}/{index}".encode()).digest()
    return np.random.default_rng(int.from_bytes(material[:8], "little"))


def random_prompt(length: int, vocab_size: int, rng: np.random.Generator, reserved: int = 64) -> tuple[int, ...]:
    """`length` token ids drawn uniformly from the vocabulary without its first `reserved` (special) ids."""
    return tuple(int(token) for token in rng.integers(reserved, vocab_size, size=length))


def text_prompt(length: int, text_ids: Sequence[int], rng: np.random.Generator) -> tuple[int, ...]:
    """`length` consecutive token ids of `text_ids` from a random place: natural text instead of random ids."""
    if len(text_ids) <= length:
        raise ValueError(f"the text has {len(text_ids)} tokens; a prompt of {length} needs a longer one")
    start = int(rng.integers(0, len(text_ids) - length))
    return tuple(text_ids[start : start + length])


# -- the standard workloads ---------------------------------------------------------------------------------------------
LengthClass = Literal["short-short", "long-short", "long-long"]
CLASSES: dict[str, tuple[float, float]] = {
    "short-short": (0.125, 0.125),
    "long-short": (0.75, 0.0625),
    "long-long": (0.5, 0.375),
}
"""Prompt and output length of each class as fractions of the context that the profile allows."""


def make_workload(
    length_class: str,
    *,
    n_requests: int,
    max_model_len: int,
    vocab_size: int,
    seed: int = 0,
    worker: int = 0,
    rate: float | None = None,
    burstiness: float = 1.0,
    concurrency: int = 1,
    shared_prefix_tokens: int = 0,
    text_ids: Sequence[int] | None = None,
    jitter: float = 0.25,
    name: str | None = None,
) -> Workload:
    """Build one of the course's three workload classes.

    Parameters
    ----------
    length_class : ``short-short`` (chat), ``long-short`` (summaries, retrieval) or ``long-long`` (reports, reasoning).
    rate : requests per second of an open loop; None gives a closed loop with `concurrency` in flight.
    shared_prefix_tokens : leading tokens that all prompts share; 0 makes every first block unique.
    text_ids : take prompts from this text instead of random ids.
    jitter : lengths are uniform in ``mean * (1 +- jitter)``.
    """
    if length_class not in CLASSES:
        raise UnknownNameError(f"There is no workload class {length_class!r}.", suggest(length_class, list(CLASSES)))
    prompt_share, output_share = CLASSES[length_class]
    rng = _request_rng(seed, worker, -1)
    prefix = random_prompt(shared_prefix_tokens, vocab_size, rng) if shared_prefix_tokens else ()
    arrivals = gamma_arrivals(n_requests, rate, burstiness, rng) if rate else [0.0] * n_requests

    def length(mean: float) -> int:
        return max(1, int(mean * rng.uniform(1 - jitter, 1 + jitter)))

    requests = []
    for index in range(n_requests):
        own = _request_rng(seed, worker, index)
        prompt_length = max(length(max_model_len * prompt_share / (1 + jitter)), shared_prefix_tokens + 9)
        # The first eight tokens identify the request, so that no two prompts share a first block by accident.
        body = prompt_length - len(prefix) - 8
        tail = text_prompt(body, text_ids, own) if text_ids is not None else random_prompt(body, vocab_size, own)
        requests.append(
            Request(
                request_id=f"{length_class}-{seed}-{worker}-{index}",
                prompt_ids=prefix + random_prompt(8, vocab_size, own) + tail,
                max_tokens=length(max_model_len * output_share / (1 + jitter)),
                arrival=arrivals[index],
                seed=seed + index,
            )
        )
    return Workload(
        name=name or length_class,
        requests=tuple(requests),
        kind="open" if rate else "closed",
        concurrency=concurrency,
        seed=seed,
        cache="cold" if not shared_prefix_tokens else "any",
        shared_prefix_tokens=shared_prefix_tokens,
    )


def agent_sessions(
    *, n_sessions: int, n_turns: int, turn_tokens: int, max_tokens: int, vocab_size: int, seed: int = 0
) -> Workload:
    """Multi-turn sessions whose prompts grow: turn t's prompt is turn t-1's prompt plus `turn_tokens` new tokens.

    Turns of one session stand in order and sessions interleave; the model's own answers are not fed back, so that the
    workload is the same for every engine.
    """
    requests = []
    contexts: list[tuple[int, ...]] = [()] * n_sessions
    for turn in range(n_turns):
        for session in range(n_sessions):
            rng = _request_rng(seed, session, turn)
            contexts[session] += random_prompt(turn_tokens, vocab_size, rng)
            requests.append(
                Request(
                    request_id=f"session{session}-turn{turn}",
                    prompt_ids=contexts[session],
                    max_tokens=max_tokens,
                    session=f"session{session}",
                    seed=seed,
                )
            )
    return Workload(name="agent-sessions", requests=tuple(requests), kind="closed", seed=seed, cache="any")


def single(prompt_ids: Sequence[int], max_tokens: int, *, name: str = "single", **fields: object) -> Workload:
    """A workload of one request; `fields` go to `Request`."""
    request = Request.model_validate(
        {"request_id": name, "prompt_ids": tuple(prompt_ids), "max_tokens": max_tokens, **fields}
    )
    return Workload(name=name, requests=(request,))


def replay(
    name: str, lengths: Sequence[tuple[float, int, int]], prompt: Callable[[int, int], tuple[int, ...]], seed: int = 0
) -> Workload:
    """Replay a trace of ``(arrival seconds, prompt tokens, output tokens)``; `prompt(index, length)` makes the ids."""
    requests = tuple(
        Request(request_id=f"{name}-{i}", prompt_ids=prompt(i, n_in), max_tokens=n_out, arrival=arrival, seed=seed + i)
        for i, (arrival, n_in, n_out) in enumerate(lengths)
    )
    return Workload(name=name, requests=requests, kind="open", seed=seed)
