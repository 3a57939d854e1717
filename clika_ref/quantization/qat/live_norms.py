"""Live batch norms in the training graph: they normalize by the batch and update statistics, as in float."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Use, Value
from clika_ref.core.operators import operator
from clika_ref.core.rewriter import erase_dead
from clika_ref.quantization.qdq.insertion import redirect_use
from clika_ref.quantization.qdq.layer_weights import reshape_along_dim

RUNNING_MEAN, BATCH_COUNTER = "running_mean", "num_batches_tracked"
"""Names of buffers of ``torch.nn.BatchNorm2d``."""


@operator()
def unfold_and_normalize(  # noqa: PLR0917 - the signature is the schema
    x: Tensor,
    scale: Tensor,
    factor: Tensor | None,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    var: Tensor,
    batches: Tensor | None = None,
    *,
    momentum: float | None,
    eps: float,
) -> Tensor:
    """Normalize the output ``[n, c, ...]`` of a layer by the batch, after undoing the fold of the norm into its weight.

    ``scale`` is the multiplier of the norm, ``factor`` a later multiplier of its channels. Running statistics and the
    number of batches are updated. A channel with multiplier 0 is 0 before its ``beta``.
    """
    whole = scale.detach() if factor is None else scale.detach() * factor
    whole = torch.where(whole == 0, torch.ones_like(whole), whole).to(x.dtype)
    x = x / reshape_along_dim(whole, 1, x.ndim)
    x = x if bias is None else x + reshape_along_dim(bias.to(x.dtype), 1, x.ndim)
    result = normalize_by_batch(x, gamma, beta, mean, var, batches, momentum=momentum, eps=eps)
    return result if factor is None else result * reshape_along_dim(factor.to(result.dtype), 1, x.ndim)


@operator()
def normalize_by_batch(  # noqa: PLR0917 - the signature is the schema
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    var: Tensor,
    batches: Tensor | None = None,
    *,
    momentum: float | None,
    eps: float,
) -> Tensor:
    """Normalize ``x[n, c, ...]`` by the batch, and update the running statistics and the number of batches.

    With ``momentum=None`` the running statistics are averages of all ``batches``. They do not change if the model does
    not count its batches.

    Raises:
        ValueError: each channel has a single value, which has no variance.
    """
    if momentum is not None or batches is None:
        result = functional.batch_norm(x, mean, var, gamma, beta, training=True, momentum=momentum or 0.0, eps=eps)
    else:
        of_batch = torch.zeros_like(mean), torch.zeros_like(var)
        result = functional.batch_norm(x, *of_batch, gamma, beta, training=True, momentum=1.0, eps=eps)
        share = 1 / (batches + 1)  # a tensor: reading its element would break the graph of torch.compile
        mean.copy_(share * of_batch[0] + (1 - share) * mean)
        var.copy_(share * of_batch[1] + (1 - share) * var)
    if batches is not None:
        batches.add_(1)
    return result


def with_live_norms(graph: Graph) -> Graph:
    """Return a clone of a float graph with batch norms that normalize by the batch."""
    clone = graph.clone()
    norms = find_frozen_norms(clone)
    for node in norms:
        insert_live_norm(clone, node, clone.constants)
    erase_dead(clone, *norms)
    return clone


def batch_counter_of(mean: Value, constants: Mapping[str, Value]) -> Value | None:
    """Return the number of batches that a norm has seen, by the name of its running mean; None if it does not count."""
    scope, _, leaf = mean.name.rpartition(RUNNING_MEAN)
    return None if leaf else constants.get(scope + BATCH_COUNTER)


def find_frozen_norms(graph: Graph) -> list[Node]:
    """Return the batch norms that were traced with their running statistics."""
    norms = [node for node in graph.nodes if node.op_type == "batch_norm" and not node.attrs["training"]]
    return [node for node in norms if isinstance(node.inputs[3], Value)]


def insert_live_norm(graph: Graph, node: Node, constants: Mapping[str, Value]) -> None:
    """Insert a live norm in place of a batch norm, which stays without readers.

    Args:
        graph: changed in place.
        node: the batch norm.
        constants: those of the module's graph, which contain the number of batches.
    """
    attrs = {name: node.attrs[name] for name in ("momentum", "eps")}
    build, readers = Builder(graph, {}, node, node.origin), node.output.uses
    operands = (*node.inputs, batch_counter_of(node.inputs[3], constants))
    result = build(normalize_by_batch, *operands, types=(node.output.type,), **attrs)
    replace_output(graph, node, readers, result)


def replace_output(graph: Graph, node: Node, readers: Sequence[Use], result: Value) -> None:
    """Give a value the name and the readers of a node's output."""
    for use in readers:
        redirect_use(graph, use, result)
    result.name, node.output.name = node.output.name, result.name
