"""Matrix products of a decoding step: few rows, large weights.

Owns: the layout of fused weights. Must not know: which layer they belong to.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Linear:
    """`x @ weight.T + bias`, for a weight [out, in] in whatever layout suits the device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.transposed = weight.detach().t()  # [in, out]
        self.bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.transposed) if self.bias is None else torch.addmm(self.bias, x, self.transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x @ weight.T + bias, in one product."""
        if self.bias is not None:
            residual = residual + self.bias
        return torch.addmm(residual, x, self.transposed)


def fuse(*modules: nn.Linear) -> Linear:
    """One product for several that share their input. The modules keep views of the fused weight: nothing is doubled."""
    with torch.no_grad():
        weight = torch.cat([module.weight for module in modules])
        weight = _laid_out(weight)
        start = 0
        for module in modules:
            end = start + module.out_features
            module.weight = nn.Parameter(weight[start:end], requires_grad=False)
            start = end
        bias = None if modules[0].bias is None else torch.cat([module.bias for module in modules])
    return Linear(weight, bias)


def _laid_out(weight: Tensor) -> Tensor:
    """On a CPU in float32, products of 2 to 16 rows are fastest with the weight stored [in, out]."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.t().contiguous().t()
    return weight
