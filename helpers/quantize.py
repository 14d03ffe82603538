"""Uniform quantization of matrices by groups along a row, and what calibration text leaves at the inputs of linear layers.

A row of a weight ``[n_out, n_in]`` is cut into groups of `group_size` neighbours along n_in. Each group has a grid
``scale * (code - zero)`` with codes 0 ... 2**bits - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from helpers.errors import CourseError

if TYPE_CHECKING:
    import torch
    from torch import nn

BITS = (2, 3, 4, 5, 6, 7, 8)


class QuantizationError(CourseError):
    """A weight, a setting or a calibration set that cannot be quantized with."""

    exit_code = 1


# -- the grid -----------------------------------------------------------------------------------------------------------
def legal_group_sizes(n_in: int) -> list[int]:
    """Group sizes from 16 on that divide a row of `n_in`, and -1, the whole row."""
    return [size for size in range(16, n_in + 1) if n_in % size == 0] + [-1]


def check_settings(n_in: int, bits: int, group_size: int, name: str = "weight") -> int:
    """The group size in elements (-1 becomes `n_in`).

    Raises
    ------
    QuantizationError : `bits` is not in 2 ... 8, or the groups do not divide a row.
    """
    if bits not in BITS:
        raise QuantizationError(
            f"{name}: {bits} bits were asked for.", f"This quantizer writes {BITS[0]} to {BITS[-1]} bits."
        )
    size = n_in if group_size == -1 else group_size
    if size < 1 or n_in % size:
        raise QuantizationError(
            f"{name}: groups of {group_size} do not divide its {n_in} inputs.",
            f"Legal group sizes: {', '.join(map(str, legal_group_sizes(n_in)))} (-1 is the whole row).",
        )
    return size


def grid(
    groups: torch.Tensor,
    bits: int,
    symmetric: bool,
    *,
    integer_zero: bool = True,
    scale_dtype: torch.dtype | None = None,
    name: str = "weight",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros of each group, from its own smallest and largest value.

    Symmetric grids span -m ... m in 2**bits - 1 steps, m the largest magnitude, and code 2**(bits - 1) is zero: the convention of
    GPTQ's code and of compressed-tensors. m itself would need half a code more than there is and is clipped by half a step.
    Asymmetric grids span the smallest to the largest value. With an integer zero both ends are moved to take in 0, which a code
    then hits exactly, and the smallest value by up to half a step to a whole code.

    Parameters
    ----------
    groups : shape ``[..., group_size]``.
    integer_zero : asymmetric only: zeros are whole codes (GPTQ, AWQ). False keeps the exact minimum (llama.cpp's Q4_1).
    scale_dtype : round the scales to what this dtype can hold, as a checkpoint will.

    Returns
    -------
    scales, zeros : shape ``[..., 1]``, in the dtype of `groups`. A group without extent has the scale 1.

    Raises
    ------
    QuantizationError : a value is NaN or infinite, or a scale vanishes in `scale_dtype`.
    """
    import torch

    top = 2**bits - 1
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    elif integer_zero:
        low, high = low.clamp(max=0), high.clamp(min=0)
    scales = (high - low) / top
    if not bool(torch.isfinite(scales).all()):
        raise QuantizationError(f"{name} holds NaN or infinite values.", "Look at where it was computed.")
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    if scale_dtype is not None:
        scales = scales.to(scale_dtype).to(groups.dtype)
        if not bool((scales > 0).all()):
            raise QuantizationError(
                f"{name}: a scale is too small for {scale_dtype}.", "Store scales in a wider dtype."
            )
    if symmetric:
        return scales, torch.full_like(scales, 2 ** (bits - 1))
    zeros = -low / scales
    return scales, zeros.round().clamp(0, top) if integer_zero else zeros


def quantize(
    w: torch.Tensor,
    bits: int,
    group_size: int,
    symmetric: bool,
    *,
    integer_zero: bool = True,
    scale_dtype: torch.dtype | None = None,
    name: str = "weight",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round each element to the nearest code of its group's grid (RTN).

    Parameters
    ----------
    w : shape ``[n_out, n_in]``, for a linear layer its weight. Groups lie along n_in.
    bits, group_size : see `check_settings`; -1 is one group for each row.
    symmetric, integer_zero, scale_dtype : see `grid`.
    name : the layer, for errors.

    Returns
    -------
    codes : uint8, shape ``[n_out, n_in]``, 0 ... 2**bits - 1.
    scales, zeros : shape ``[n_out, n_in / group_size]``.
    """
    import torch

    n_out, n_in = w.shape
    groups = w.reshape(n_out, -1, check_settings(n_in, bits, group_size, name))
    scales, zeros = grid(groups, bits, symmetric, integer_zero=integer_zero, scale_dtype=scale_dtype, name=name)
    codes = (groups / scales + zeros).round().clamp(0, 2**bits - 1)
    return codes.reshape(n_out, n_in).to(torch.uint8), scales[..., 0], zeros[..., 0]


def dequantize(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """``scale * (code - zero)``, shape ``[n_out, n_in]``, in the dtype of `scales`."""
    n_out, n_in = codes.shape
    groups = codes.reshape(n_out, scales.shape[1], -1).to(scales.dtype)
    return ((groups - zeros[..., None]) * scales[..., None]).reshape(n_out, n_in)


def fake_quantize(w: torch.Tensor, bits: int, group_size: int, symmetric: bool, **options: Any) -> torch.Tensor:
    """`quantize`, then `dequantize`: the values that the codes stand for, in the dtype of `w`. No speed can be claimed for it."""
    return dequantize(*quantize(w, bits, group_size, symmetric, **options)).to(w.dtype)


def stored_bits(bits: int, group_size: int, symmetric: bool, scale_bits: int = 16) -> float:
    """Bits per weight of a checkpoint: the code, and its share of a scale and (asymmetric) of a zero of `bits` bits."""
    return bits + (scale_bits + (0 if symmetric else bits)) / group_size


# -- errors that a layer's output sees ----------------------------------------------------------------------------------
def output_error(w: torch.Tensor, approximate: torch.Tensor, hessian: torch.Tensor) -> float:
    """``||X (W - W')^T|| / ||X W^T||`` over the calibration inputs X, from ``H = 2 X^T X / n`` alone.

    Parameters
    ----------
    w, approximate : shape ``[n_out, n_in]``.
    hessian : shape ``[n_in, n_in]``; see `Calibration`.

    Returns
    -------
    The relative error. A layer whose output is 0 on every input has the error 0 where `approximate` says 0 too, else infinity.
    """
    wrong = w - approximate
    error, size = ((wrong @ hessian) * wrong).sum().clamp(min=0), ((w @ hessian) * w).sum()
    if float(size) <= 0:
        return float("inf") if float(error) > 0 else 0.0
    return float((error / size).sqrt())


# -- calibration --------------------------------------------------------------------------------------------------------
def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers inside `module` by name, the output head left out."""
    from torch import nn

    found = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    return {name: layer for name, layer in found.items() if name.split(".")[-1] != "lm_head"}


class Calibration:
    """Statistics of the inputs of linear layers, gathered while calibration text runs through them.

    ``with Calibration(linear_layers(model)) as seen: model(ids)``; afterwards, for each layer's name, ``seen.hessians[name]``
    (float32, shape ``[n_in, n_in]``, ``2 X^T X / n_tokens``), ``seen.absmax[name]`` and ``seen.absmean[name]`` (shape ``[n_in]``)
    and ``seen.n_tokens[name]``. Layers that read the same input tensor (q, k and v) share theirs; ``seen.readers`` lists them.

    Parameters
    ----------
    layers : name to layer.
    hessians : False leaves the Hessians out, which are the costly part.

    Raises
    ------
    QuantizationError : at the end, where no token reached a layer, or an input was NaN or infinite; the layer is named.
    """

    def __init__(self, layers: Mapping[str, nn.Linear], *, hessians: bool = True) -> None:
        self._layers, self._wants_hessians = dict(layers), hessians
        self._handles: list[Any] = []
        self._owner: dict[str, str] = {}
        self._last: tuple[Any, str] | None = None
        self.hessians: dict[str, torch.Tensor] = {}
        self.absmax: dict[str, torch.Tensor] = {}
        self.absmean: dict[str, torch.Tensor] = {}
        self.n_tokens: dict[str, int] = {}

    def __enter__(self) -> Self:
        for name, layer in self._layers.items():
            self._handles.append(layer.register_forward_pre_hook(lambda _, args, name=name: self._see(name, args[0])))
        return self

    def _see(self, name: str, x: torch.Tensor) -> None:
        import torch

        if self._last is not None and self._last[0] is x:
            self._owner[name] = self._last[1]
            return
        self._owner[name], self._last = name, (x, name)
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        magnitude = rows.abs()
        if name not in self.n_tokens:
            self.n_tokens[name] = 0
            self.absmax[name] = magnitude.new_zeros(rows.shape[1])
            self.absmean[name] = magnitude.new_zeros(rows.shape[1])
            if self._wants_hessians:
                self.hessians[name] = torch.zeros(rows.shape[1], rows.shape[1], device=rows.device)
        if len(rows) == 0:
            return
        self.n_tokens[name] += len(rows)
        self.absmax[name] = torch.maximum(self.absmax[name], magnitude.amax(0))
        self.absmean[name] += magnitude.sum(0)
        if self._wants_hessians:
            self.hessians[name].addmm_(rows.T, rows, alpha=2.0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._last = None
        if kind is None:
            self._finish()

    def _finish(self) -> None:
        import torch

        for name in self._layers:
            if not self.n_tokens.get(self._owner.get(name, name)):
                raise QuantizationError(
                    f"No calibration token reached the layer {name}.", "Give at least one calibration text."
                )
        for name, n in self.n_tokens.items():
            self.absmean[name] /= n
            if not bool(torch.isfinite(self.absmean[name]).all()):
                raise QuantizationError(
                    f"An input of the layer {name} is NaN or infinite.",
                    "Calibrate in float32 or bfloat16, and look for a text that overflows.",
                )
            if self._wants_hessians:
                self.hessians[name] /= n
        for statistics in (self.hessians, self.absmax, self.absmean, self.n_tokens):
            for name, owner in self._owner.items():
                if owner in statistics:
                    statistics[name] = statistics[owner]  # type: ignore[assignment]

    @property
    def readers(self) -> dict[str, list[str]]:
        """For each distinct input, under the name of the first layer that read it: the names of all layers that did."""
        groups: dict[str, list[str]] = {}
        for name, owner in self._owner.items():
            groups.setdefault(owner, []).append(name)
        return groups
