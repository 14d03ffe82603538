"""`StreamTrace`: what one request looked like from outside, and every latency metric of the course computed from it.

All times are seconds on one monotonic clock (``time.monotonic``, which processes of one machine share). A *chunk* is what
arrived at once; it may hold no token (a role marker), one, or several. Token counts come from token ids or from the
server's usage report, never from tokenizing text again.

=============  =====================================================  ==================================================
metric         formula                                                defined when
=============  =====================================================  ==================================================
ttft           first - sent                                           a token arrived
ttft_schedule  first - scheduled                                      a token arrived
tpot           (last - first) / (n - tokens in the first chunk)       more tokens than the first chunk held
itl            gap / tokens in the later chunk, once for each token   every chunk's token count is known
chunk_gap      gap between chunks that hold tokens                    always
e2e            last - scheduled                                       a token arrived (of a failed request: so far)
=============  =====================================================  ==================================================

TPOT follows vLLM's ``bench serve`` where each chunk holds one token. Where the first chunk holds several, only the tokens
after it were paid for between `first` and `last`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

ChunkKind = Literal["role", "text", "reasoning", "tool"]
TokenSource = Literal["ids", "usage", "estimated", "none"]


class Chunk(BaseModel):
    """One arrival. ``n_tokens`` is None where the server did not say how many tokens the chunk holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    time: float
    kind: ChunkKind = "text"
    n_tokens: int | None = Field(default=None, ge=0)
    text: str = ""

    @property
    def carries_tokens(self) -> bool:
        """A role marker or an empty delta carries none and never counts as a first token."""
        if self.n_tokens is not None:
            return self.n_tokens > 0
        return self.kind != "role" and self.text != ""


class StreamTrace(BaseModel):
    """One request's life: when it was due, when it left, what arrived and how it ended."""

    model_config = ConfigDict(extra="forbid")

    request_id: str
    scheduled: float
    sent: float
    chunks: list[Chunk] = Field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    token_source: TokenSource = "none"
    cached_tokens: int | None = None
    output_ids: list[int] | None = None
    finish_reason: str | None = None
    error: str | None = None
    queued: float | None = None
    """Seconds the engine itself reports between arrival and first being scheduled, where it does."""

    @model_validator(mode="after")
    def _times_go_forward(self) -> StreamTrace:
        times = [chunk.time for chunk in self.chunks]
        if any(later < earlier for earlier, later in pairwise(times)):
            raise ValueError(f"request {self.request_id}: chunk times go backwards")
        return self

    # -- what arrived ---------------------------------------------------------------------------------------------
    @property
    def token_chunks(self) -> list[Chunk]:
        """The chunks that hold at least one token of any kind."""
        return [chunk for chunk in self.chunks if chunk.carries_tokens]

    @property
    def ok(self) -> bool:
        """The request ended as it should: no error, and a token arrived."""
        return self.error is None and bool(self.token_chunks)

    @property
    def n(self) -> int | None:
        """Completion tokens, or None where nobody counted them."""
        return self.completion_tokens

    @property
    def n_first_chunk(self) -> int:
        """Tokens in the first token-bearing chunk; 1 where its count is not known."""
        chunks = self.token_chunks
        if not chunks or chunks[0].n_tokens is None:
            return 1
        return chunks[0].n_tokens

    @property
    def token_times_known(self) -> bool:
        """Whether every token can be placed in a chunk, and the chunks add up to `n`."""
        chunks = self.token_chunks
        if not chunks or any(chunk.n_tokens is None for chunk in chunks):
            return False
        return sum(chunk.n_tokens or 0 for chunk in chunks) == self.n

    @property
    def first(self) -> float | None:
        """Arrival of the first token of any kind, reasoning included."""
        chunks = self.token_chunks
        return chunks[0].time if chunks else None

    @property
    def first_visible(self) -> float | None:
        """Arrival of the first token a user would see as the answer."""
        return next((chunk.time for chunk in self.token_chunks if chunk.kind == "text"), None)

    @property
    def last(self) -> float | None:
        """Arrival of the last token."""
        chunks = self.token_chunks
        return chunks[-1].time if chunks else None

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks if chunk.kind == "text")

    # -- metrics --------------------------------------------------------------------------------------------------
    @property
    def send_lag(self) -> float:
        """sent - scheduled: how late the client was, in seconds."""
        return self.sent - self.scheduled

    @property
    def ttft(self) -> float | None:
        """Time to first token from sending, seconds."""
        return None if self.first is None else self.first - self.sent

    @property
    def ttft_schedule(self) -> float | None:
        """Time to first token from the moment the workload scheduled the request, seconds."""
        return None if self.first is None else self.first - self.scheduled

    @property
    def ttft_visible(self) -> float | None:
        """Time to the first token of the visible answer, from sending, seconds."""
        return None if self.first_visible is None else self.first_visible - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first chunk, seconds per token."""
        if self.first is None or self.last is None or self.n is None:
            return None
        later = self.n - self.n_first_chunk
        return (self.last - self.first) / later if later > 0 else None

    @property
    def itl(self) -> list[float] | None:
        """One inter-token latency for each token after the first chunk, seconds; None unless token times are known.

        A chunk of k tokens that came g seconds after its predecessor gives k values g/k.
        """
        if not self.token_times_known:
            return None
        values: list[float] = []
        chunks = self.token_chunks
        for earlier, later in pairwise(chunks):
            k = later.n_tokens or 0
            values += [(later.time - earlier.time) / k] * k
        return values

    @property
    def chunk_gaps(self) -> list[float]:
        """Seconds between token-bearing chunks: what a reader of the stream sees, whatever a chunk holds."""
        times = [chunk.time for chunk in self.token_chunks]
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def e2e(self) -> float | None:
        """Time from schedule to last token, seconds."""
        return None if self.last is None else self.last - self.scheduled
