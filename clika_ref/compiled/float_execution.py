"""Execution of a float module: its graph, in training mode with adapter dropout and, on request, live batch norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from clika_ref.compiled.weights import Weights, weight_paths
from clika_ref.core.fx_execution import compile_with_fx
from clika_ref.core.ir import Graph
from clika_ref.lora.adapters import clone_with_dropout
from clika_ref.quantization.qat.live_norms import with_live_norms


class FloatExecutor:
    """Runs the graph of a module with its current parameters."""

    def __init__(self, graph: Graph) -> None:
        with_dropout = clone_with_dropout(graph)
        self._run = _compile(graph)
        self._dropout_run = self._run if with_dropout is graph else _compile(with_dropout)
        self._live_run = _compile(with_live_norms(with_dropout))

    def __call__(self, module: nn.Module, inputs: Sequence[Tensor], *, has_live_norms: bool) -> Sequence[Tensor]:
        """Compute the outputs of the graph with the weights and the training mode of a module."""
        if not module.training:
            return self._run(module, *inputs)
        return (self._live_run if has_live_norms else self._dropout_run)(module, *inputs)


def _compile(graph: Graph) -> Callable[..., tuple[Tensor, ...]]:
    """Return the fast form of a graph as a function of a module with its weights, and of its inputs."""
    paths, run = weight_paths(graph), compile_with_fx(graph)
    return lambda module, *inputs: run(Weights(module, paths), *inputs)
