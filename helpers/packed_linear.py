"""Linear layers whose weights lie in the layout that oneDNN's kernels read: packed once, not at every pass.

PyTorch on a CPU keeps a linear layer's weight in plain rows. For a product with two or more rows oneDNN reorders it into
blocks first, at every call, which for a small batch can take as long as the product itself. Packing is for inference only.
"""

from __future__ import annotations

from typing import Any

import torch

from helpers.errors import EngineError


def refusal(device: str = "cpu") -> str | None:
    """Why weights cannot be packed here, in one sentence, or None where they can."""
    if device != "cpu":
        return "packing is for CPUs; a GPU's kernels read plain weights"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this PyTorch was built without oneDNN"
    return None


class PackedLinear(torch.nn.Module):
    """``x @ weight.T + bias`` for x of shape ``[..., in_features]``, its weight packed for about `n_rows` rows of x."""

    def __init__(self, linear: torch.nn.Linear, n_rows: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        plain = linear.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(plain, n_rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_linears(model: Any, n_rows: int) -> Any:
    """Replace every linear layer of `model`, in place, by a packed one; a tied output head gets a packed copy of its own.

    A packed model is for running only: do not save it, tie it or read its weights.

    Parameters
    ----------
    n_rows : rows (tokens of all sequences) of a typical pass; the layout is chosen for it, other numbers of rows work too.

    Raises
    ------
    EngineError : weights cannot be packed here.
    """
    device = next(model.parameters()).device.type
    if reason := refusal(device):
        raise EngineError(f"Weights cannot be packed: {reason}.", "Use the model as it is.")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(module, name, PackedLinear(child, n_rows))
    return model
