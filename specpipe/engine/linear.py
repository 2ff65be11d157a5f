"""Matrix products of a decoding step: few rows, large weights.

Owns: how a weight is laid out and multiplied. Must not know: which layer it belongs to.

On an x86 CPU, weights whose values float16 can hold (every bfloat16 or float16 checkpoint) are packed for FBGEMM:
float16 in memory, float32 rows and sums. It reads half the bytes of float32, and up to 6 rows cost what one costs, so
that verification is nearly free; torch's own products of 2 to 16 rows cost 3 to 8 times one row there. Such a model
computes in float32 whatever the dtype of its weights. Other float32 weights are stored [in, out], which suits few rows.

Where results are hints (a draft worker's), weights may be *rounded* to 8 bits instead: half the bytes again, and 8 rows
cost 1.4 times one row where float16 takes 2.3 times. See docs/decisions/0016.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# The overload's own call spends 30 us looking for Python dispatch; what it then calls is called here.
_packed_product = getattr(torch.ops.quantized.linear_dynamic_fp16, "_op", torch.ops.quantized.linear_dynamic_fp16)
_rounded_product = getattr(torch.ops.quantized.linear_dynamic, "_op", torch.ops.quantized.linear_dynamic)
_MIN_SIZE = 1e-20  # of what is divided by
_CHECKED_ROWS = 4
_MAX_ROUNDING = 0.1  # of the length of a product, for rows of evenly spread numbers; it is 0.02 to 0.03
_MAX_ERROR = 2.0**-25  # half a step of float16's smallest numbers: less than the rounding of float32 sums


Combine = Callable[[Tensor], Tensor]
"""What several ranks do with their parts of a product, see specpipe.engine.parallel."""


class Linear:
    """`x @ weight.T + bias`, for a weight [out, in] that is given away to it. `combine` makes a rank's part whole.

    `is_rounded`: the weight is rounded to 8 bits, where it can be packed at all."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, combine: Combine | None = None, *, is_rounded: bool = False
    ) -> None:
        self.combine = combine
        self.rounded = _round(weight) if is_rounded else None
        self.packed = _pack(weight, bias) if self.rounded is None else None
        self.transposed: Tensor | None = None  # [in, out]
        self.bias = bias
        if self.rounded is not None:
            self.bias = None if bias is None else bias.float()
        elif self.packed is None:
            self._transpose(weight)

    def _transpose(self, weight: Tensor) -> None:
        if can_pack(weight):  # beyond float16's range, where rows are float32
            weight, self.bias = weight.float(), None if self.bias is None else self.bias.float()
        is_slow_layout = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.transposed = weight.t().contiguous() if is_slow_layout else weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in] -> [num_rows, out]"""
        product = self._multiply(x)
        return product if self.combine is None else self.combine(product)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x @ weight.T + bias"""
        if self.transposed is None or self.combine is not None:
            return self(x).add_(residual)
        if self.bias is not None:
            residual = residual + self.bias
        return torch.addmm(residual, x, self.transposed)

    def _multiply(self, x: Tensor) -> Tensor:
        if self.rounded is not None:
            product = _multiply_rounded(x, self.rounded)
            return product if self.bias is None else product.add_(self.bias)
        if self.transposed is None:
            packed_product: Tensor = _packed_product(x, self.packed)
            return packed_product
        return torch.mm(x, self.transposed) if self.bias is None else torch.addmm(self.bias, x, self.transposed)


class LinearModule(nn.Module):  # type: ignore[misc]
    """Takes the place of an nn.Linear or Conv1D inside a transformers model."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def fuse(*modules: nn.Linear, is_rounded: bool = False) -> Linear:
    """One product for several that share their input. The modules give their weights away."""
    with torch.no_grad():
        weight = torch.cat([module.weight for module in modules])
        bias = None if modules[0].bias is None else torch.cat([module.bias for module in modules])
    for module in modules:
        module.weight = module.bias = None
    return Linear(weight, bias, combine_of(modules[0]), is_rounded=is_rounded)


def combine_with(module: nn.Module, combine: Combine) -> None:
    """Let the outputs of `module` be combined with the other ranks', by itself or by the Linear it is turned into."""
    module.combine = combine
    module.register_forward_hook(lambda _module, _inputs, output: combine(output))


def combine_of(module: nn.Module) -> Combine | None:
    return getattr(module, "combine", None)


def pack_model(model: nn.Module, *, is_rounded: bool = False) -> None:
    """Replace what can be packed, in place, and turn the rest of the model to float32. A no-op where nothing packs."""
    if not can_pack(next(model.parameters())):
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) not in (nn.Linear, Conv1D):
                continue
            weight = child.weight.detach() if type(child) is nn.Linear else child.weight.detach().t()
            linear = Linear(weight, child.bias, combine_of(child), is_rounded=is_rounded)
            if linear.transposed is None:
                setattr(parent, name, LinearModule(linear))
    model.float()


def can_pack(weight: Tensor) -> bool:
    """Whether weights of this kind and place may be packed (their values decide each)."""
    return weight.device.type == "cpu" and weight.dtype != torch.float16 and _has_fbgemm()


def can_round(weight: Tensor) -> bool:
    """Whether weights of this kind and place may be rounded to 8 bits."""
    return can_pack(weight) and _has_rounded_products()


@functools.cache
def _has_fbgemm() -> bool:
    """FBGEMM is torch's engine on x86 with AVX2; one small product tells whether it works."""
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.eye(8), None)
        product = torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 8), packed)
    except (AttributeError, RuntimeError):
        return False
    return bool((product == 1).all())


@functools.cache
def _has_rounded_products() -> bool:
    """torch means to drop these; one small product tells whether they are there."""
    try:
        product = _multiply_rounded(torch.ones(2, 8), _round_packed(torch.eye(8)))
    except (AttributeError, RuntimeError):
        return False
    return bool((product - 1).abs().max() < 0.05)


def _pack(weight: Tensor, bias: Tensor | None) -> object | None:
    if not can_pack(weight):
        return None
    with torch.no_grad():
        full = weight.float().contiguous()
        if not (full.half().float() - full).abs().max() <= _MAX_ERROR:
            return None
        packed: object = torch.ops.quantized.linear_prepack_fp16(full, None if bias is None else bias.float())
        return packed


def _round(weight: Tensor) -> object | None:
    if not can_round(weight):
        return None
    with torch.no_grad():
        full = weight.float()
        packed = _round_packed(full) if full.isfinite().all() else None
        return packed if packed is not None and _is_near(packed, full) else None


def _round_packed(weight: Tensor) -> object:
    """8 bits, with one scale for each output."""
    scales = weight.abs().amax(1).clamp_(min=_MIN_SIZE).double() / 127
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, that this will go: see _has_rounded_products
        rounded = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed: object = torch.ops.quantized.linear_prepack(rounded, None)
    return packed


def _is_near(packed: object, weight: Tensor) -> bool:
    """Whether the products of a few rows are what they should be, but for the rounding."""
    rows = torch.randn(_CHECKED_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    exact = rows @ weight.T
    return bool((_multiply_rounded(rows, packed) - exact).norm() <= _MAX_ROUNDING * exact.norm())


def _multiply_rounded(x: Tensor, packed: object) -> Tensor:
    """torch rounds all rows by one scale: they are brought to one size first, or a small one would be lost beside a
    large one."""
    sizes = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True).clamp_(min=_MIN_SIZE)
    product: Tensor = _rounded_product(x / sizes, packed, True)
    return product.mul_(sizes)
