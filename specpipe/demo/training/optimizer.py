"""The optimiser of both models: Muon for the matrices of the layers, AdamW for embeddings and norms.

Muon is momentum whose update is made (nearly) orthogonal by a Newton-Schulz iteration
(https://kellerjordan.github.io/posts/muon/). Matrices of one shape are iterated on together, in float32, which on a
CPU without fast bfloat16 is what makes it cheap.
"""

from collections import defaultdict
from typing import Any

import torch

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Replace the singular values of each matrix by values near 1. [num, rows, cols] -> [num, rows, cols] float32"""
    a, b, c = _NEWTON_SCHULZ
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Optimizer:
    """Muon and AdamW behind one `step`; both learning rates are peaks, scaled by what `step` is given."""

    def __init__(self, model: torch.nn.Module, *, muon_rate: float, adam_rate: float, weight_decay: float) -> None:
        self._matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
        self._momenta = [torch.zeros_like(p) for p in self._matrices]
        chosen = {id(p) for p in self._matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        self._adam = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.97), weight_decay=0.0)
        self._muon_rate = muon_rate
        self._adam_rate = adam_rate
        self._weight_decay = weight_decay

    def step(self, scale: float, momentum: float = 0.95) -> None:
        """Apply the gradients, with both learning rates times `scale`, and clear them."""
        with torch.no_grad():
            self._step_matrices(self._muon_rate * scale, momentum)
        for group in self._adam.param_groups:
            group["lr"] = self._adam_rate * scale
        self._adam.step()
        for parameter in (*self._matrices, *self._adam.param_groups[0]["params"]):
            parameter.grad = None

    def _step_matrices(self, rate: float, momentum: float) -> None:
        by_shape: dict[torch.Size, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for parameter, average in zip(self._matrices, self._momenta, strict=True):
            average.lerp_(parameter.grad, 1 - momentum)
            by_shape[parameter.shape].append((parameter, parameter.grad.lerp(average, momentum)))
        for shape, pairs in by_shape.items():
            updates = orthogonalise(torch.stack([update for _, update in pairs]))
            stretch = max(1.0, shape[0] / shape[1]) ** 0.5
            for (parameter, _), update in zip(pairs, updates, strict=True):
                parameter.mul_(1 - rate * self._weight_decay).add_(update, alpha=-rate * stretch)

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": self._momenta, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for momentum, saved in zip(self._momenta, state["momenta"], strict=True):
            momentum.copy_(saved)
        self._adam.load_state_dict(state["adam"])
