"""The effect of each piece on the outputs of the whole model: how much of its output error reaches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clika_ref.partial_graphs.pieces import Piece
from clika_ref.torch_internals.trees import pytree

PROBES = 8
"""Number of backward passes; each sample of the batch is a probe of its own, too."""

MIN_GAIN = 1e-12
"""The gain of a piece whose outputs do not reach those of the model, except by branches."""


@dataclass
class OutputGains:
    """Measures the gain of each piece in a call of the model: the ratio of the relative errors it leads to.

    If an error of a piece has a squared norm of ``s`` times that of the piece's outputs, the outputs of the model have
    an error of ``gain * s`` times their squared norm, to first order. One backward pass from random numbers ``u``
    returns ``u @ J`` for all pieces, with ``J`` the Jacobian of the model's outputs by those of a piece.

    Source: Hutchinson, A stochastic estimator of the trace of the influence matrix (1989).
    """

    _outputs: list[tuple[Piece, Tensor]] = field(default_factory=list[tuple[Piece, Tensor]])

    def watch(self, piece: Piece, results: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results of a call of a piece, with gradients recorded for them."""
        return tuple(self._watch_tensor(piece, x) if isinstance(x, Tensor) else x for x in results)

    def _watch_tensor(self, piece: Piece, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        watched = x if x.requires_grad else x.detach().requires_grad_()
        self._outputs.append((piece, watched))
        return watched

    def measure(self, results: Any) -> dict[Piece, float]:
        """Return the gain of each piece, from the results of the model; empty if they have no gradient."""
        ends = [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]
        if not ends or not self._outputs:
            return {}
        generator = torch.Generator().manual_seed(0)
        gains = dict.fromkeys((piece for piece, _ in self._outputs), 0.0)
        for _ in range(PROBES):
            probes = [_make_probe(end, generator) for end in ends]
            watched = [x for _, x in self._outputs]
            found = torch.autograd.grad(ends, watched, probes, retain_graph=True, allow_unused=True)
            for (piece, x), gradient in zip(self._outputs, found, strict=True):
                if gradient is not None:
                    squares = gradient.double().square().sum() * x.detach().double().square().mean()
                    gains[piece] += float(squares) / PROBES / len(ends)
        return {piece: max(gain, MIN_GAIN) for piece, gain in gains.items()}


def _make_probe(end: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers for an output, divided by its norm."""
    random = torch.randn(end.shape, generator=generator).to(end.device, end.dtype)
    return random / end.detach().norm().clamp_min(torch.finfo(end.dtype).tiny)
