"""Faults of the cleanup passes."""

from __future__ import annotations

import clika_ref_cleanup.addmm_to_linear as addmms
import clika_ref_cleanup.fold_batch_norm as batch_norms
import clika_ref_cleanup.fold_constants as constants
import clika_ref_cleanup.merge_chains as chains
import clika_ref_cleanup.merge_common_subexpressions as subexpressions
import clika_ref_cleanup.merge_equal_constants as equals
import clika_ref_cleanup.mul_to_silu as silus
import clika_ref_cleanup.push_slices as slices
import clika_ref_cleanup.remove_dropout as dropout
import clika_ref_cleanup.remove_identities as identities
import torch

from clika_ref.core.ir import Graph, Value
from clika_ref.quantization.qdq import norm_folding
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("passes")


def ignore_randomness(original, graph, operators) -> None:
    """Run a pass as if no operator were random."""
    random = [(node.op, node.op.random) for node in graph.nodes]
    for op, _ in random:
        op.random = False
    try:
        original(graph, operators)
    finally:
        for op, was in reversed(random):
            op.random = was


# fold-batch-norm


@FAULTS.function("fold-batch-norm", "a shared weight is scaled in place", norm_folding, "scale_in_parts")
def _(original, weight, factors):
    return weight.copy_(original(weight, factors))


@FAULTS.function("fold-batch-norm", "eps is omitted", norm_folding, "norm_scale")
def _(original, gamma, var, *, eps):
    return original(gamma, var, eps=0.0)


@FAULTS.function("fold-batch-norm", "the bias of the layer is not scaled", batch_norms, "fold_bias")
def _(original, bias, *statistics, eps, dtype):
    shift = original(None, *statistics, eps=eps, dtype=torch.float64)
    return (shift if bias is None else shift + bias.double()).to(dtype)


@FAULTS.function("fold-batch-norm", "the variance is used as the standard deviation", norm_folding, "norm_scale")
def _(original, gamma, var, *, eps):
    return original(gamma, var**2, eps=eps)


@FAULTS.function(
    "fold-batch-norm", "weights of transposed convolutions are scaled along dim 0", batch_norms, "fold_weight"
)
def _(original, weight, gamma, var, *, eps, groups):
    return original(weight, gamma, var, eps=eps, groups=groups if weight.shape[0] != len(var) else None)


@FAULTS.rule("fold-batch-norm", "a layer in training mode is folded, too", batch_norms, "fold_batch_norm")
def _(original, node, build):
    given = node.attrs["training"]
    node.attrs["training"] = False
    result = original(node, build)
    node.attrs["training"] = given
    return result


@FAULTS.rule("fold-batch-norm", "other readers of the layer read the folded one", batch_norms, "fold_batch_norm")
def _(original, node, build):
    x = node.inputs[0]
    if not isinstance(x, Value) or x.producer is None or len(x.uses) < 2 or any(u.user is build.graph for u in x.uses):
        return original(node, build)
    others = [use for use in x.uses if use.user is not node]
    copied = build(x.producer.op, *x.producer.inputs, types=(x.type,), **x.producer.attrs)
    build.graph.replace(x, copied)
    assert others
    return original(node, build)


# merge-common-subexpressions


@FAULTS.function("merge-common-subexpressions", "attributes are not compared", subexpressions, "call_key")
def _(original, node):
    op, inputs, _, types = original(node)
    return op, inputs, types


@FAULTS.function("merge-common-subexpressions", "0.0 and -0.0 are treated as one number", subexpressions, "literal_key")
def _(original, item):
    return (float, item) if isinstance(item, float) else original(item)


@FAULTS.function("merge-common-subexpressions", "operands are compared without their order", subexpressions, "call_key")
def _(original, node):
    op, inputs, attrs, types = original(node)
    return op, frozenset(inputs), attrs, types


@FAULTS.function("merge-common-subexpressions", "literal operands are not compared", subexpressions, "call_key")
def _(original, node):
    op, inputs, attrs, types = original(node)
    return op, tuple(v for v in inputs if isinstance(v, Value)), attrs, types


FAULTS.rewrite("merge-common-subexpressions", "random calls are merged")(ignore_randomness)


# merge-chains


@FAULTS.rule("merge-chains", "two permutations are composed in the wrong order", chains, "merge_permutes")
def _(original, node, build):
    maker = node.inputs[0].producer
    if maker is None or maker.op_type != "permute":
        return original(node, build)
    rank = len(node.attrs["dims"])
    dims = tuple(node.attrs["dims"][d % rank] % rank for d in maker.attrs["dims"])
    x = maker.inputs[0]
    return x if dims == tuple(range(rank)) else build("permute", x, dims=dims, types=(node.output.type,))


@FAULTS.rule("merge-chains", "a permutation is inverted by applying it twice", chains, "merge_permutes")
def _(original, node, build):
    maker = node.inputs[0].producer
    if maker is None or maker.op_type != "permute" or maker.attrs["dims"] != node.attrs["dims"]:
        return original(node, build)
    return maker.inputs[0] if maker.inputs[0].type == node.output.type else original(node, build)


@FAULTS.rule("merge-chains", "the order of dims longer than 1 is not compared", chains, "reshape_instead_of_permute")
def _(original, node, build):
    x = node.inputs[0]
    if 1 not in x.type.shape or x.type.rank < 3:
        return original(node, build)
    return build("reshape", x, shape=node.output.type.shape, types=(node.output.type,))


@FAULTS.function("merge-chains", "a cast to a narrower float and back is removed", chains, "is_mergeable_cast")
def _(original, first, middle, last):
    return original(first, middle, last) or (first == last and first.is_floating_point and middle.is_floating_point)


@FAULTS.function("merge-chains", "float32 is assumed to represent every int32", chains, "is_representable")
def _(original, narrow, wide):
    return original(narrow, wide) or (narrow == torch.int32 and wide == torch.float32)


@FAULTS.function("merge-chains", "a cast to bool before another cast is removed", chains, "is_mergeable_cast")
def _(original, first, middle, last):
    return original(first, middle, last) or (middle == torch.bool and last == first)


@FAULTS.rule("merge-chains", "dims that the first expand added are lost", chains, "merge_expands")
def _(original, node, build):
    maker = node.inputs[0].producer
    if maker is None or maker.op_type != "expand":
        return original(node, build)
    return build("expand", maker.inputs[0], size=maker.output.type.shape, types=(node.output.type,))


# fold-constants, fold-literals


@FAULTS.rewrite("fold-constants", "tensors that a call overwrites are folded")
def _(original, graph, operators):
    constants._Folding(graph, constants.MEBIBYTE, lambda value: True, ("dequantize", "quantize")).fold("{}")


@FAULTS.function("fold-constants", "outputs of the graph are folded, too", constants._Folding, "_is_foldable")
def _(original, self, node):
    known = all(not isinstance(v, Value) or self._is_known(v) for v in node.inputs)
    return original(self, node) or (known and not node.op.random and node.op_type not in self.keep)


FAULTS.rewrite("fold-constants", "random numbers are folded into a constant")(ignore_randomness)


@FAULTS.function(
    "fold-constants", "constants with other readers are removed with their folded reader", constants._Folding, "fold"
)
def _(original, self, name):
    before = dict(self.graph.constants)
    original(self, name)
    folded = {v for v in self.replaced if v.is_constant}
    for key, value in before.items():
        if value in folded and self.graph.constants.get(key) is value and key not in self.graph.state:
            value.data = torch.zeros_like(value.data)


@FAULTS.function("fold-literals", "parameters are treated as literals", constants, "is_literal")
def _(original, value):
    return value.is_constant


# merge-equal-constants


@FAULTS.function("merge-equal-constants", "only some of the bytes are compared", equals, "_compute_digest")
def _(original, value):
    return b""


@FAULTS.rewrite(
    "merge-equal-constants", "state that calls overwrite is merged with constants of equal initial elements"
)
def _(original, graph, operators):
    state = dict(graph.state)
    graph.state.clear()
    original(graph, operators)
    graph.state.update(state)


# remove-identities, remove-dropout, remove-dead-nodes


@FAULTS.rule(
    "remove-identities", "subtracting from a neutral number is treated as neutral", identities, "remove_neutral_operand"
)
def _(original, node, build):
    first, second = node.inputs[:2]
    if node.op_type == "sub" and not isinstance(first, Value) and first == 0 and second.type == node.output.type:
        return second
    return original(node, build)


@FAULTS.rule("remove-identities", "a rounding division by 1 is removed, too", identities, "remove_neutral_operand")
def _(original, node, build):
    x, number = node.inputs[:2]
    if node.op_type == "div" and not isinstance(number, Value) and number == 1 and x.type == node.output.type:
        return x
    return original(node, build)


@FAULTS.rule("remove-identities", "alpha is ignored", identities, "remove_neutral_operand")
def _(original, node, build):
    x, number = node.inputs[:2]
    if node.op_type in ("add", "sub") and not isinstance(number, Value) and isinstance(x, Value):
        scaled = node.attrs.get("alpha", 1) != 1 and number == node.attrs["alpha"] and x.type == node.output.type
        return x if scaled else original(node, build)
    return original(node, build)


@FAULTS.rule("remove-identities", "a permutation that keeps the shape is removed", identities, "remove_idle_move")
def _(original, node, build):
    x = node.inputs[0]
    return x if node.op_type == "permute" and x.type == node.output.type else original(node, build)


@FAULTS.rule("remove-identities", "a pad whose amounts add up to 0 is removed", identities, "remove_idle_move")
def _(original, node, build):
    x = node.inputs[0]
    return x if node.op_type == "pad" and x.type == node.output.type else original(node, build)


@FAULTS.rule("remove-identities", "a roll whose shifts add up to 0 is removed", identities, "remove_idle_move")
def _(original, node, build):
    if node.op_type == "roll" and sum(node.attrs["shifts"]) == 0:
        return node.inputs[0]
    return original(node, build)


@FAULTS.rule("remove-dropout", "dropout is removed in training, too", dropout, "remove_dropout")
def _(original, node, build):
    return node.inputs[0] if node.inputs[0].type == node.output.type else original(node, build)


@FAULTS.rewrite("remove-dead-nodes", "only the first result of a node is checked for readers")
def _(original, graph: Graph, operators):
    for node in graph.nodes_backward():
        if not node.outputs[0].uses:
            graph.erase(node)


@FAULTS.rewrite("remove-dead-nodes", "a value that is returned twice is returned only once")
def _(original, graph: Graph, operators):
    original(graph, operators)
    for node in graph.nodes:
        for value in node.outputs:
            if sum(use.user is graph for use in value.uses) > 1:
                graph.erase(node)


# addmm-to-linear


@FAULTS.rule("addmm-to-linear", "alpha and beta are ignored", addmms, "addmm_to_linear")
def _(original, node, build):
    given = node.attrs
    node.attrs = {"beta": 1, "alpha": 1}
    result = original(node, build)
    node.attrs = given
    return result


@FAULTS.rule("addmm-to-linear", "a square weight is not transposed", addmms, "addmm_to_linear")
def _(original, node, build):
    bias, x, weight = node.inputs
    found = original(node, build)
    if weight.type.shape[0] != weight.type.shape[1] or not isinstance(found, Value):
        return found
    return build("linear", x, weight, bias, types=(node.output.type,))


# mul-to-silu


@FAULTS.rule("mul-to-silu", "the sigmoid of another tensor is taken for its own", silus, "mul_to_silu")
def _(original, node, build):
    for x, gate in (node.inputs, node.inputs[::-1]):
        producer = gate.producer if isinstance(gate, Value) else None
        if producer is not None and producer.op_type == "sigmoid" and getattr(x, "type", None) == node.output.type:
            return build("silu", x, types=(node.output.type,))
    return original(node, build)


# push-slices


@FAULTS.rule("push-slices", "the first rows are computed instead", slices, "slice_before_linear")
def _(original, node, build):
    given = node.attrs
    node.attrs = {**given, "start": 0, "end": node.output.type.shape[given["dim"]]}
    result = original(node, build)
    node.attrs = given
    return result
