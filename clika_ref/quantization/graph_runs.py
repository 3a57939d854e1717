"""Runs of a graph on data, without gradients or with images in the channels-last memory format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.execution import EnterHook, Hook, interpret
from clika_ref.core.ir import Graph, Node, Value

_CHANNELS_LAST_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory format by the rank of an image, batch and channel dims included."""


@torch.no_grad()
def compute_outputs(
    graph: Graph, inputs: Sequence[Tensor], hook: Hook | None = None, enter: EnterHook | None = None
) -> list[Tensor]:
    """Return the outputs of a graph, as `interpret` computes them on copies of the inputs, without gradients."""
    return interpret(graph, [x.clone() for x in inputs], hook, enter)[0]


def run_graph(
    graph: Graph, inputs: Sequence[Tensor], hook: Hook | None = None, enter: EnterHook | None = None
) -> list[Tensor]:
    """Return the outputs of a graph, as `interpret` computes them, with images in the channels-last memory format.

    Convolutions keep the format, so that one copy serves a whole network; on a CPU it takes four fifths of the time.
    Shapes are unchanged.
    """
    return interpret(graph, [_to_channels_last(x) for x in inputs], hook, enter)[0]


def visit_activations(graph: Graph, inputs: Sequence[Tensor], visit: Callable[[Value, Tensor], Any]) -> None:
    """Run a graph, and call ``visit`` with each input and each activation, and its data."""

    def visit_results(node: Node, results: tuple[Tensor, ...]) -> None:
        for value, result in zip(node.outputs, results, strict=True):
            visit(value, result)

    for value, x in zip(graph.inputs, inputs, strict=True):
        visit(value, x)
    run_graph(graph, inputs, visit_results)


def _to_channels_last(x: Tensor) -> Tensor:
    form = _CHANNELS_LAST_FORMATS.get(x.ndim)
    return x if form is None or not x.is_floating_point() else x.contiguous(memory_format=form)
