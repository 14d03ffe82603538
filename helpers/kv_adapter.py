"""The one file that touches Transformers' cache API, so that a release that changes it breaks one file.

A cache object is what ``model(..., past_key_values=cache)`` takes. Shapes of keys and values are
``[batch, n_kv_heads, n_tokens, head_dim]``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from helpers.errors import EngineError, UnknownNameError, suggest
from helpers.hardware import Hardware, describe, synchronize

CacheKind = Literal["dynamic", "static", "offloaded", "quantized"]
CACHE_KINDS: tuple[CacheKind, ...] = ("dynamic", "static", "offloaded", "quantized")


def refusal(kind: str, hardware: Hardware | None = None) -> str | None:
    """Why a kind of cache cannot be used on this hardware, in one sentence, or None where it can."""
    if kind not in CACHE_KINDS:
        raise UnknownNameError(f"There is no cache kind {kind!r}.", suggest(kind, list(CACHE_KINDS)))
    if kind == "offloaded":
        capability = (hardware or describe()).capabilities["offloaded_cache"]
        return None if capability.available else capability.reason
    return None


def new_cache(
    kind: CacheKind,
    config: Any,
    *,
    max_cache_len: int | None = None,
    nbits: int = 4,
    group_size: int = 64,
    residual_length: int = 32,
) -> Any:
    """An empty cache for a model of this `config`.

    Parameters
    ----------
    kind : ``dynamic`` grows by concatenation; ``static`` is allocated once for `max_cache_len` tokens; ``offloaded`` keeps
        all layers but the current one in host memory; ``quantized`` stores the prompt in `nbits` bits with one scale and
        zero point for each group of `group_size` (HQQ); newer tokens stay in full precision until `residual_length` of them
        have gathered, then everything is quantized again.

    Raises
    ------
    EngineError : this hardware cannot use that kind.
    """
    if reason := refusal(kind):
        raise EngineError(
            f"A {kind} cache is not usable here: {reason}.", "Use a GPU profile, or another kind of cache."
        )
    from transformers.cache_utils import DynamicCache, QuantizedCache, StaticCache

    if kind == "dynamic":
        return DynamicCache(config=config)
    if kind == "offloaded":
        return DynamicCache(config=config, offloading=True)
    if kind == "static":
        if not max_cache_len:
            raise EngineError("A static cache needs max_cache_len.", "Give prompt length plus the tokens to generate.")
        return StaticCache(config=config, max_cache_len=max_cache_len)
    return QuantizedCache(
        backend="hqq",
        config=config,
        nbits=nbits,
        axis_key=1,
        axis_value=1,
        q_group_size=group_size,
        residual_length=residual_length,
    )


def layer_tensors(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's (keys, values) as they are stored in full precision; for a quantized cache the residual part only."""
    return [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "is_initialized", False)]


def n_cached_tokens(cache: Any) -> int:
    """Tokens that the cache holds."""
    return int(cache.get_seq_length())


def truncate(cache: Any, n_tokens: int) -> None:
    """Forget all but the first `n_tokens` tokens, in place (speculative decoding's rollback)."""
    excess = n_cached_tokens(cache) - n_tokens
    if excess > 0:
        cache.crop(-excess)


def cache_bytes(cache: Any) -> int:
    """Bytes that the cache's tensors hold: full-precision parts, quantized parts, and their scales and zero points."""
    total = sum(t.numel() * t.element_size() for pair in layer_tensors(cache) for t in pair)
    for layer in cache.layers:
        for name in ("_quantized_keys", "_quantized_values"):
            total += _nested_bytes(getattr(layer, name, None))
    return total


def is_compileable(cache: Any) -> bool:
    """Whether Transformers declares that ``torch.compile`` can take a decode step with this cache: its shapes stay fixed."""
    return bool(cache.is_compileable)


@dataclass(frozen=True)
class ForcedDecode:
    """What `decode_forced` saw."""

    logits: torch.Tensor
    """float32, shape ``[n_steps, vocab_size]``, on the CPU: row i predicts token ``n_context + 1 + i``."""
    step_seconds: list[float]
    """Seconds of each decode step."""
    cache_bytes: int
    """Bytes that the cache's tensors held after the last step."""
    n_tokens: int
    """Tokens that the cache held after the last step."""


def decode_forced(model: Any, cache: Any, ids: torch.Tensor, n_context: int) -> ForcedDecode:
    """Prefill `n_context` tokens into an empty `cache`, then feed the other tokens of `ids` one by one (teacher forcing).

    Every cache sees the same tokens, so that its logits can be held against another cache's position by position.

    Parameters
    ----------
    ids : int64, shape ``[n]`` with ``n > n_context``.
    """
    ids = ids.to(model.device)
    rows, seconds = [], []
    with torch.inference_mode():
        model(ids[None, :n_context], past_key_values=cache, logits_to_keep=1)
        for index in range(n_context, len(ids)):
            synchronize(model.device.type)
            start = time.perf_counter()
            logits = model(ids[None, index : index + 1], past_key_values=cache).logits
            synchronize(model.device.type)
            seconds.append(time.perf_counter() - start)
            rows.append(logits[0, -1].float().cpu())
    return ForcedDecode(torch.stack(rows), seconds, cache_bytes(cache), len(ids))


def decode_greedy(model: Any, cache: Any, prompt_ids: torch.Tensor, n_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after `prompt_ids` (int64, shape ``[n]``) through an empty `cache`, whatever ends a sequence.

    Returns the `n_tokens` ids and the logits that each was taken from, float32, shape ``[n_tokens, vocab_size]``.
    """
    tokens: list[int] = []
    rows = []
    with torch.inference_mode():
        fed = prompt_ids[None].to(model.device)
        for _ in range(n_tokens):
            row = model(fed, past_key_values=cache, logits_to_keep=1).logits[0, -1].float().cpu()
            rows.append(row)
            tokens.append(int(row.argmax()))
            fed = torch.tensor([[tokens[-1]]], device=model.device)
    return tokens, torch.stack(rows)


def _nested_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_nested_bytes(item) for item in value.values())
    if isinstance(value, tuple | list):
        return sum(_nested_bytes(item) for item in value)
    return 0
