"""Checks of notebook 13's exercises: what must travel, unequal layers, a receive with a bug, a purchase, a meeting point."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from helpers.exercises import Answer, Mismatch, exercise, expect, expect_close, expect_equal, parts


def _token_by_token(n_prompt: int, n_kept: int, block_size: int) -> int:
    """Reference: the blocks of all tokens, without those of which every token is kept."""
    blocks: dict[int, list[int]] = {}
    for token in range(n_prompt):
        blocks.setdefault(token // block_size, []).append(token)
    kept = [i for i, tokens in blocks.items() if len(tokens) == block_size and max(tokens) < n_kept]
    return len(blocks) - len(kept)


@exercise("13.1", "What must travel")
def _to_send(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    cases: list[tuple[str, int, int, int, int]] = [
        ("blocks travel whole", 100, 0, 32, 10),
        ("a full block that is kept does not travel", 100, 64, 32, 10),
        ("a block that is kept in part travels", 100, 63, 32, 10),
        ("a block that is kept in part travels", 100, 31, 32, 10),
        ("a prompt of whole blocks", 128, 32, 32, 23_040),
        ("everything is kept, in full blocks: nothing travels", 96, 96, 32, 7),
        ("everything is kept, but the last block is not full", 97, 97, 32, 7),
        ("a prompt shorter than a block", 5, 5, 16, 3),
        ("blocks of one token", 9, 4, 1, 2),
    ]
    rng = random.Random(13)
    for _ in range(200):
        n = rng.randint(1, 300)
        cases.append(("counted token by token", n, rng.randint(0, n), rng.choice((1, 7, 16, 32)), rng.randint(1, 999)))
    for prop, n_prompt, n_kept, block_size, kv_token in cases:
        blocks = _token_by_token(n_prompt, n_kept, block_size)
        expected = (blocks, blocks * block_size * kv_token)
        given = f"n_prompt={n_prompt}, n_kept={n_kept}, block_size={block_size}, kv_token={kv_token}"
        got = ask(prop, given, expected, n_prompt, n_kept, block_size, kv_token)
        n, size = parts("the answer is a pair (blocks, bytes)", given, expected, got, 2)
        expect_equal(f"{prop} (blocks)", given, n, expected[0])
        expect_equal(f"{prop} (bytes)", given, size, expected[1])


def _longest_path(compute: list[float], transfer: list[float]) -> float:
    """Reference: the longest way through the two rows: compute up to some layer, from there on the link without a pause."""
    if not compute:
        return 0.0
    return max(sum(compute[: i + 1]) + sum(transfer[i:]) for i in range(len(compute)))


@exercise("13.2", "The last byte of unequal layers")
def _last_byte(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    cases: list[tuple[str, list[float], list[float]]] = [
        ("one layer: compute, then send", [2.0], [3.0]),
        ("a fast link: all but the last layer is hidden", [1.0] * 5, [0.5] * 5),
        ("a slow link: it is busy from the first layer on", [1.0] * 5, [2.0] * 5),
        ("equal speeds", [1.0] * 4, [1.0] * 4),
        ("a dear first transfer holds up the others", [1.0, 1.0, 1.0], [5.0, 1.0, 1.0]),
        ("a dear last transfer is not hidden", [1.0, 1.0, 1.0], [0.1, 0.1, 5.0]),
        ("the link waits for a slow layer", [1.0, 9.0, 1.0], [2.0, 2.0, 2.0]),
        ("a layer that sends nothing (a state that stays)", [1.0, 1.0, 1.0], [1.0, 0.0, 1.0]),
        ("a layer that costs nothing to compute", [0.0, 2.0], [1.0, 1.0]),
        ("nothing travels: the compute is all", [1.0, 2.0], [0.0, 0.0]),
        ("no layers", [], []),
    ]
    rng = random.Random(132)
    for _ in range(150):
        n = rng.randint(1, 12)
        rows = [[rng.choice((0.0, rng.random(), 5 * rng.random())) for _ in range(n)] for _ in range(2)]
        cases.append(("the longest way through both rows", rows[0], rows[1]))
    for prop, compute, transfer in cases:
        expected = _longest_path(compute, transfer)
        given = f"compute={[round(v, 3) for v in compute]}, transfer={[round(v, 3) for v in transfer]}"
        expect_close(prop, given, ask(prop, given, expected, list(compute), list(transfer)), expected)


class _Stream:
    """A sender that gives its bytes in pieces of given sizes, and is gone after them."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.data, self.sizes, self.asked = data, itertools.cycle(sizes), 0

    def read(self, n: int) -> bytes:
        if n < 1:
            raise ValueError("read was asked for no bytes")
        self.asked += 1
        if self.asked > 100_000:
            raise RuntimeError("read was called a hundred thousand times")
        n = min(n, next(self.sizes))
        part, self.data = self.data[:n], self.data[n:]
        return part


@exercise("13.3", "A receive with a bug")
def _receive(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    rng = random.Random(133)
    data = bytes(rng.randrange(256) for _ in range(900))
    cases: list[tuple[str, int, list[int], int]] = [
        ("everything in one piece", 40, [4096], 40),
        ("a stream that comes in pieces", 300, [100], 300),
        ("pieces of one byte", 60, [1], 60),
        ("what follows belongs to the next message", 100, [64], 300),
        ("what follows belongs to the next message, also in one piece", 100, [4096], 300),
        ("zeros are bytes like others", 0, [7], 0),
        ("a sender that is gone raises EOFError", 300, [100], 200),
        ("a sender that is gone before the first byte raises EOFError", 10, [4096], 0),
        ("one byte is missing", 300, [4096], 299),
    ]
    for _ in range(80):
        n = rng.randint(1, 800)
        sizes = [rng.randint(1, 200) for _ in range(5)]
        cases.append(("pieces of any size", n, sizes, rng.choice((n, n, n + 50, max(0, n - rng.randint(1, 40))))))
    for prop, n, sizes, sent in cases:
        source = bytes(300) if n == 0 else data
        n, sent = (300, 300) if n == 0 else (n, sent)
        stream = _Stream(source[:sent], sizes)
        given = f"n_bytes={n}, the sender gives {sent} bytes in pieces of at most {sizes}"
        if sent >= n:
            got = ask(prop, given, f"the first {n} bytes", stream.read, n)
            ok = isinstance(got, (bytes, bytearray, memoryview)) and bytes(got) == source[:n]
            expect(prop, given, ok, f"the first {n} bytes", repr(got)[:60])
            expect(f"{prop}: nothing more is taken", given, len(stream.data) == sent - n, sent - n, len(stream.data))
        else:
            try:
                got = ask(prop, given, "EOFError", stream.read, n)
            except Mismatch as error:
                if isinstance(error.__cause__, EOFError):
                    continue
                raise
            raise Mismatch(prop, given, "EOFError", repr(got)[:60])


def _all_purchases(money: int, rates: tuple[int, int], prices: tuple[int, int]) -> tuple[int, int, int]:
    """Reference: every cluster that can be paid, sorted."""
    clusters = [
        (-min(p * rates[0], d * rates[1]), p * prices[0] + d * prices[1], p, d)
        for p in range(1, money + 1)
        for d in range(1, money + 1)
        if p * prices[0] + d * prices[1] <= money
    ]
    if not clusters:
        return 0, 0, 0
    rate, _, p, d = min(clusters)
    return p, d, -rate


@exercise("13.4", "A cluster for your money")
def _best_purchase(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    cases: list[tuple[str, int, tuple[int, int], tuple[int, int]]] = [
        ("two prefill machines for one decode machine", 3, (56, 100), (1, 1)),
        ("the rate is the weaker half's", 2, (56, 100), (1, 1)),
        ("money that is left is not spent", 4, (50, 100), (1, 1)),
        ("a dear machine may be worth its price", 20, (34, 10), (5, 2)),
        ("a dear machine may not be worth its price", 20, (10, 30), (9, 1)),
        ("of equally fast clusters the cheapest", 11, (10, 10), (3, 2)),
        ("a machine more of the faster half helps nobody", 12, (7, 7), (2, 2)),
        ("not enough for one of each", 3, (9, 9), (2, 2)),
        ("exactly enough for one of each", 4, (9, 9), (2, 2)),
        ("all the money may be spent", 7, (10, 15), (2, 3)),
    ]
    rng = random.Random(134)
    for _ in range(120):
        rates, prices = (rng.randint(1, 12), rng.randint(1, 12)), (rng.randint(1, 7), rng.randint(1, 7))
        cases.append(("every cluster tried", rng.randint(1, 34), rates, prices))
    for prop, money, rates, prices in cases:
        expected = _all_purchases(money, rates, prices)
        given = f"money={money}, rates={rates}, prices={prices}"
        got = ask(prop, given, expected, money, *rates, *prices)
        items = parts("the answer is (n_prefill, n_decode, rate)", given, expected, got, 3)
        for name, value, wanted in zip(("n_prefill", "n_decode", "rate"), items, expected, strict=True):
            expect_equal(f"{prop} ({name})", given, value, wanted)


def _meeting(compute: list[int], fetch: list[int]) -> tuple[int, int]:
    """Reference: both sums at every place, the first smallest."""
    front = list(itertools.accumulate(compute, initial=0))
    back = list(itertools.accumulate(reversed(fetch), initial=0))[::-1]
    times = [max(a, b) for a, b in zip(front, back, strict=True)]
    return times.index(min(times)), min(times)


@exercise("13.5", "Where fetching and computing meet")
def _meeting_point(answer: Callable[..., Any]) -> None:
    ask = Answer(answer)
    cases: list[tuple[str, list[int], list[int]]] = [
        ("equal speeds meet in the middle", [1] * 8, [1] * 8),
        ("a fast link: fetch more than you compute", [3] * 8, [1] * 8),
        ("a slow link: compute more than you fetch", [1] * 8, [3] * 8),
        ("a link that is out of reach: compute everything", [1, 2, 3], [999] * 3),
        ("a link for nothing: fetch everything", [5, 5, 5], [0, 0, 0]),
        ("later blocks cost more to compute", [1, 2, 4, 8, 16, 32], [6] * 6),
        ("both work at the same time: the longer one counts", [4, 4], [3, 3]),
        ("blocks are fetched from the back", [5, 5, 5], [9, 2, 1]),
        ("of equals compute the fewest", [2, 0, 0, 2], [0, 0, 2, 2]),
        ("one block", [7], [9]),
        ("one block", [9], [7]),
        ("nothing to do", [], []),
    ]
    rng = random.Random(135)
    for _ in range(150):
        n = rng.randint(1, 20)
        rows = [[rng.randint(0, 9) for _ in range(n)] for _ in range(2)]
        cases.append(("every place tried", rows[0], rows[1]))
    for prop, compute, fetch in cases:
        expected = _meeting(compute, fetch)
        given = f"compute={compute}, fetch={fetch}"
        got = ask(prop, given, expected, list(compute), list(fetch))
        n, seconds = parts("the answer is a pair (n_computed, seconds)", given, expected, got, 2)
        expect_equal(f"{prop} (n_computed)", given, n, expected[0])
        expect_close(f"{prop} (seconds)", given, seconds, expected[1])
