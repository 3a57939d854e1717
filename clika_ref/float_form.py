"""Execution of a float module: its graph, in training mode with adapter dropout and, on request, live batch norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from clika_ref.core.ir import Graph
from clika_ref.fast_form import fast_form
from clika_ref.lora.adapters import in_training
from clika_ref.training_graph import with_live_norms
from clika_ref.weights import Weights, weight_places


class FloatForm:
    """Runs the graph of a module with its current parameters."""

    def __init__(self, graph: Graph) -> None:
        with_dropout = in_training(graph)
        self._run = _compiled(graph)
        self._dropping_run = self._run if with_dropout is graph else _compiled(with_dropout)
        self._live_run = _compiled(with_live_norms(with_dropout))

    def __call__(self, module: nn.Module, inputs: Sequence[Tensor], *, has_live_norms: bool) -> Sequence[Tensor]:
        """Compute the outputs of the graph with the weights and the training mode of a module."""
        if not module.training:
            return self._run(module, *inputs)
        return (self._live_run if has_live_norms else self._dropping_run)(module, *inputs)


def _compiled(graph: Graph) -> Callable[..., tuple[Tensor, ...]]:
    """Return the fast form of a graph as a function of a module with its weights, and of its inputs."""
    places, run = weight_places(graph), fast_form(graph)
    return lambda module, *inputs: run(Weights(module, places), *inputs)
