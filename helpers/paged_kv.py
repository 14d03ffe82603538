"""A paged KV cache: blocks, tables and reference counts, and a real model that reads its keys and values through them.

Three parts, each usable alone. `BlockManager` is bookkeeping: it knows which block holds which token and never touches a
tensor. `PagedKVCache` is memory: one pool of slots for each layer. `PagedModel` runs a Transformers model over that pool, any
mix of prefills and decodes in one step.

Source of the design: Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP
2023, sections 4.1 to 4.5. Prefix sharing by block hashes is vLLM's automatic prefix caching.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from helpers.errors import EngineError, ModelError
from helpers.models import kv_shape


class OutOfBlocks(EngineError):
    """The pool has too few free blocks. Nothing was changed; a scheduler waits, or preempts a sequence and asks again."""


class BlockCopy(NamedTuple):
    """Keys and values of block `source` must be copied to block `target` before the next step writes."""

    source: int
    target: int


def block_hash(parent: bytes, token_ids: Iterable[int]) -> bytes:
    """The hash of one full block of tokens, which also fixes every token before it through its `parent` block's hash.

    Keys and values of a token depend on all tokens before it, so equal blocks may be shared only after equal prefixes.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


# -- bookkeeping --------------------------------------------------------------------------------------------------------
class BlockManager:
    """Which physical block holds which tokens of which sequence.

    A block is free when no table holds it. With prefix caching a free block keeps its contents, and may be revived by its hash,
    until it is taken for other tokens; the block that was freed longest ago is taken first.

    Parameters
    ----------
    n_blocks : blocks in the pool.
    block_size : tokens that one block holds.
    enable_prefix_caching : whether full blocks are shared between sequences by hash.

    Raises
    ------
    EngineError : a pool or a block of no size.
    """

    def __init__(self, n_blocks: int, block_size: int, *, enable_prefix_caching: bool = False) -> None:
        if n_blocks < 1 or block_size < 1:
            raise EngineError(
                f"A pool of {n_blocks} blocks of {block_size} tokens holds nothing.", "Give at least one of each."
            )
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * n_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))
        self._tables: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._chains: dict[str, list[bytes]] = {}
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    # -- what it knows --------------------------------------------------------------------------------------------------
    @property
    def n_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        """Physical blocks that some table holds."""
        return self.n_blocks - len(self._free)

    @property
    def n_logical(self) -> int:
        """Table entries of all sequences: the blocks that would be used if nothing were shared."""
        return sum(map(len, self._tables.values()))

    @property
    def sequences(self) -> list[str]:
        """Ids of all sequences that hold a table, in order of allocation."""
        return list(self._tables)

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that `n_tokens` tokens need: the last one may be partly empty."""
        return -(-n_tokens // self.block_size)

    def table(self, seq_id: str) -> list[int]:
        """The physical block of each logical block of a sequence."""
        return list(self._table(seq_id))

    def n_tokens(self, seq_id: str) -> int:
        """Tokens for which a sequence has room reserved and used."""
        self._table(seq_id)
        return len(self._tokens[seq_id])

    def slots(self, seq_id: str, start: int, stop: int) -> list[int]:
        """The pool's slot of each position from `start` up to `stop`: block times block_size plus the offset in the block."""
        table, size = self._table(seq_id), self.block_size
        if not 0 <= start <= stop <= len(self._tokens[seq_id]):
            raise EngineError(
                f"Sequence {seq_id!r} has positions 0 to {len(self._tokens[seq_id])}, not {start} to {stop}.",
                "Call append before asking for the slots of new tokens.",
            )
        return [table[position // size] * size + position % size for position in range(start, stop)]

    def cached_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """Blocks, in order, whose hashes say that they hold the beginning of `token_ids`.

        The last token is never counted as cached: a step that computes no token has no logits to sample from.
        """
        blocks: list[int] = []
        parent, size = b"", self.block_size
        for index in range((len(token_ids) - 1) // size if self.enable_prefix_caching else 0):
            parent = block_hash(parent, token_ids[index * size : (index + 1) * size])
            if parent not in self._block_of:
                break
            blocks.append(self._block_of[parent])
        return blocks

    # -- what it does ---------------------------------------------------------------------------------------------------
    def allocate(self, seq_id: str, token_ids: Sequence[int]) -> int:
        """Give a new sequence blocks for `token_ids`; returns how many leading tokens are already cached.

        Raises
        ------
        OutOfBlocks : too few blocks are free.
        EngineError : the sequence exists already, or there are no tokens.
        """
        if seq_id in self._tables or not token_ids:
            why = "has blocks already" if seq_id in self._tables else "has no tokens"
            raise EngineError(f"Sequence {seq_id!r} {why}.", "Allocate a new id with at least one token.")
        shared = self.cached_prefix(token_ids)
        n_new = self.blocks_for(len(token_ids)) - len(shared)
        self._demand(n_new + sum(self.ref_counts[block] == 0 for block in shared))
        for block in shared:
            self._share(block)
        self._tables[seq_id] = shared + [self._take() for _ in range(n_new)]
        self._tokens[seq_id] = list(token_ids)
        self._chains[seq_id] = [self._hash_of[block] for block in shared]
        return len(shared) * self.block_size

    def append(self, seq_id: str, token_ids: Sequence[int]) -> list[BlockCopy]:
        """Make room for more tokens; returns the copies to make first (copy-on-write: at most one).

        Only a sequence's last block can be written again, and only while it is partly empty. If others hold it too, the
        writer gets a copy of its own and the others keep the original.

        Raises
        ------
        OutOfBlocks : too few blocks are free.
        EngineError : there is no such sequence.
        """
        table, held = self._table(seq_id), self._tokens[seq_id]
        n_new = self.blocks_for(len(held) + len(token_ids)) - len(table)
        writes_last = bool(token_ids) and len(held) % self.block_size != 0
        must_copy = writes_last and self.ref_counts[table[-1]] > 1
        self._demand(n_new + must_copy)
        copies = []
        if must_copy:
            copies.append(BlockCopy(table[-1], self._take()))
            self._release(table[-1])
            table[-1] = copies[0].target
        table.extend(self._take() for _ in range(n_new))
        held.extend(token_ids)
        return copies

    def commit(self, seq_id: str, n_tokens: int | None = None) -> None:
        """Say that keys and values of the first `n_tokens` tokens (all by default) are written: full blocks may be shared.

        A hash that another block bears already is not given twice: both blocks hold the same, and one can be found.
        """
        table, held, chain = self._table(seq_id), self._tokens[seq_id], self._chains[seq_id]
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for index in range(len(chain), (len(held) if n_tokens is None else n_tokens) // size):
            parent = chain[-1] if chain else b""
            chain.append(block_hash(parent, held[index * size : (index + 1) * size]))
            if chain[-1] not in self._block_of and table[index] not in self._hash_of:
                self._block_of[chain[-1]] = table[index]
                self._hash_of[table[index]] = chain[-1]

    def fork(self, parent_id: str, child_id: str) -> None:
        """Give a new sequence the parent's tokens and blocks, which both then share. No block is taken.

        Raises
        ------
        EngineError : there is no such parent, or the child exists already.
        """
        table = self._table(parent_id)
        if child_id in self._tables:
            raise EngineError(f"Sequence {child_id!r} has blocks already.", "Fork into a new id.")
        for block in table:
            self._share(block)
        self._tables[child_id] = list(table)
        self._tokens[child_id] = list(self._tokens[parent_id])
        self._chains[child_id] = list(self._chains[parent_id])

    def free(self, seq_id: str) -> None:
        """Let a sequence go. Its last block is the first to be taken again: prefixes are worth keeping longest.

        Raises
        ------
        EngineError : there is no such sequence (a double free).
        """
        for block in reversed(self._table(seq_id)):
            self._release(block)
        del self._tables[seq_id], self._tokens[seq_id], self._chains[seq_id]

    def check(self) -> None:
        """Assert the invariants: counts match tables, free means unused, tables are as long as needed, hashes are true."""
        holders = [0] * self.n_blocks
        for seq_id, table in self._tables.items():
            assert len(table) == self.blocks_for(len(self._tokens[seq_id])), f"{seq_id}: table of {len(table)} blocks"
            assert len(set(table)) == len(table), f"{seq_id}: a block stands twice in its table"
            for block in table:
                holders[block] += 1
        assert holders == self.ref_counts, "reference counts differ from the tables"
        assert set(self._free) == {block for block, n in enumerate(holders) if n == 0}, (
            "free list differs from the tables"
        )
        assert {block: key for key, block in self._block_of.items()} == self._hash_of, (
            "hashes and blocks are not inverse"
        )
        for seq_id, table in self._tables.items():
            for block, key in zip(table, self._chains[seq_id], strict=False):
                assert self._hash_of.get(block, key) == key, f"{seq_id}: block {block} bears a stale hash"

    # -- single blocks --------------------------------------------------------------------------------------------------
    def _table(self, seq_id: str) -> list[int]:
        if seq_id not in self._tables:
            raise EngineError(
                f"Sequence {seq_id!r} holds no blocks.", "Allocate or fork it first; free a sequence only once."
            )
        return self._tables[seq_id]

    def _demand(self, n_blocks: int) -> None:
        if n_blocks > self.n_free:
            raise OutOfBlocks(
                f"{n_blocks} blocks are needed, {self.n_free} of {self.n_blocks} are free.",
                "Wait until a sequence ends, preempt one, or start with a larger pool.",
            )

    def _take(self) -> int:
        """The block that was freed longest ago, for new tokens: whatever hash it bore is no longer true."""
        block, _ = self._free.popitem(last=False)
        key = self._hash_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
        self.ref_counts[block] = 1
        return block

    def _share(self, block: int) -> None:
        if self.ref_counts[block] == 0:
            del self._free[block]
        self.ref_counts[block] += 1

    def _release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self._free[block] = None


# -- memory -------------------------------------------------------------------------------------------------------------
class PagedKVCache:
    """Keys and values of every layer, each ``[n_layers, n_slots, n_kv_heads, head_dim]``; slot = block * block_size + offset.

    The pool is allocated once, filled with zeros: a slot that is read under a mask must hold a number.
    """

    def __init__(
        self,
        n_layers: int,
        n_blocks: int,
        block_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        size = (n_layers, n_blocks * block_size, n_kv_heads, head_dim)
        self.block_size = block_size
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)

    @classmethod
    def for_model(cls, model: Any, n_blocks: int, block_size: int) -> PagedKVCache:
        """A pool in the shape, dtype and place of a Transformers model."""
        shape = kv_shape(model.config)
        return cls(
            shape.n_layers, n_blocks, block_size, shape.n_kv_heads, shape.head_dim, model.dtype, model.device.type
        )

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole pool."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store ``[n, n_kv_heads, head_dim]`` of one layer in `slots` (int64, ``[n]``)."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Carry out copies in order: a later one may read what an earlier one wrote."""
        for source, target in copies:
            for pool in (self.keys, self.values):
                blocks = pool.view(pool.shape[0], -1, self.block_size, *pool.shape[2:])
                blocks[:, target] = blocks[:, source]


def paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention of a batch of sequences whose keys and values lie scattered over one layer's pool.

    Parameters
    ----------
    q : ``[n_seqs, n_q_heads, n_new, head_dim]``.
    keys, values : the layer's pool, ``[n_slots, n_kv_heads, head_dim]``.
    slots : int64, ``[n_seqs, n_context]``: where each position lies; rows of shorter sequences are filled up with any slot.
    mask : bool, broadcastable to ``[n_seqs, 1, n_new, n_context]``: True where a query may look.

    Returns
    -------
    ``[n_seqs, n_new, n_q_heads, head_dim]``.
    """
    k, v = keys[slots].transpose(1, 2), values[slots].transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


# -- a model over it ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Feed:
    """Tokens of one sequence to run in one step; they stand at positions `start`, `start` + 1, ..."""

    seq_id: str
    start: int
    token_ids: Sequence[int]


class _Group(NamedTuple):
    """Rows of a step that attend together: row numbers ``[n_seqs, n_new]``, context slots and mask as in `paged_attention`."""

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


class PagedModel:
    """A Transformers model of the Llama kind (Llama, SmolLM2, Qwen2.5) whose attention reads and writes a paged cache.

    Everything but attention sees one flat list of tokens, whatever sequences they belong to (Orca's selective batching).

    Raises
    ------
    ModelError : the model is not of that kind, or has sliding windows.
    """

    def __init__(self, model: Any, cache: PagedKVCache, manager: BlockManager) -> None:
        layers = getattr(getattr(model, "model", None), "layers", None)
        attention = getattr(layers[0], "self_attn", None) if layers else None
        if not hasattr(attention, "q_proj") or hasattr(attention, "q_norm") or any(kv_shape(model.config).windows):
            raise ModelError(
                f"{type(model).__name__} is not a plain Llama-like model with full attention.",
                "Use a model of the catalogue (SmolLM2, Qwen2.5).",
            )
        self.model = model
        self.cache = cache
        self.manager = manager
        self.device = model.device
        self._head_dim = kv_shape(model.config).head_dim
        self.n_tokens_run = 0
        """Tokens that went through the model since it was made."""

    def step(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Run one step. Returns the logits after each feed's last token, ``[n_feeds, vocab_size]``.

        The manager must already have room for every token; copies that it asked for must have been made.
        """
        base = self.model.model
        ids = torch.tensor([t for feed in feeds for t in feed.token_ids], device=self.device)
        places = [p for feed in feeds for p in range(feed.start, feed.start + len(feed.token_ids))]
        slots = [s for f in feeds for s in self.manager.slots(f.seq_id, f.start, f.start + len(f.token_ids))]
        written = torch.tensor(slots, device=self.device)
        groups = self._groups(feeds)
        x = base.embed_tokens(ids)
        cos, sin = base.rotary_emb(x[None], torch.tensor(places, device=self.device)[None])
        for index, layer in enumerate(base.layers):
            q, k, v = self._project(layer, x, cos[0, :, None], sin[0, :, None])
            self.cache.write(index, written, k, v)
            x = x + layer.self_attn.o_proj(self._attend(index, q, groups))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.n_tokens_run += len(ids)
        ends = torch.tensor([len(feed.token_ids) for feed in feeds], device=self.device).cumsum(0) - 1
        return self.model.lm_head(base.norm(x[ends]))

    def _project(self, layer: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rotated queries, rotated keys, and values: ``[n_tokens, n_heads, head_dim]`` each."""
        h = layer.input_layernorm(x)
        attention = layer.self_attn
        q, k, v = (
            p(h).view(len(x), -1, self._head_dim) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def _attend(self, layer: int, q: torch.Tensor, groups: Sequence[_Group]) -> torch.Tensor:
        out = torch.empty_like(q)
        for rows, slots, mask in groups:
            got = paged_attention(
                q[rows].transpose(1, 2), self.cache.keys[layer], self.cache.values[layer], slots, mask
            )
            out[rows.flatten()] = got.flatten(0, 1)
        return out.flatten(1)

    def _groups(self, feeds: Sequence[Feed]) -> list[_Group]:
        """Single tokens (decodes) attend in one padded batch; every longer feed (a prefill or a chunk of one) by itself."""
        starts, row = [], 0
        for feed in feeds:
            starts.append(row)
            row += len(feed.token_ids)
        singles = [i for i, feed in enumerate(feeds) if len(feed.token_ids) == 1]
        batches = [singles] * bool(singles) + [[i] for i, feed in enumerate(feeds) if len(feed.token_ids) > 1]
        return [self._group([feeds[i] for i in batch], [starts[i] for i in batch]) for batch in batches]

    def _group(self, feeds: Sequence[Feed], starts: Sequence[int]) -> _Group:
        n_new = len(feeds[0].token_ids)
        stops = [feed.start + n_new for feed in feeds]
        longest = max(stops)
        lists = [self.manager.slots(f.seq_id, 0, stop) for f, stop in zip(feeds, stops, strict=True)]
        slots = torch.tensor([row + [0] * (longest - len(row)) for row in lists], device=self.device)
        new = torch.arange(n_new, device=self.device)
        last_seen = torch.tensor([feed.start for feed in feeds], device=self.device)[:, None] + new
        mask = torch.arange(longest, device=self.device) <= last_seen[:, None, :, None]
        return _Group(torch.tensor(starts, device=self.device)[:, None] + new, slots, mask)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on ``[n_tokens, n_heads, head_dim]``: element i is paired with element i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
