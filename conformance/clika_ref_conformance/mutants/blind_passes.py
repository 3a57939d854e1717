"""Faulty passes, written without knowledge of the graphs and tests that must find them."""

from __future__ import annotations

from unittest.mock import patch

import torch
from clika_ref_cleanup import (
    fold_batch_norm,
    fold_constants,
    merge_chains,
    merge_common_subexpressions,
    merge_equal_constants,
    push_transposes,
    remove_identities,
)

from clika_ref.core.ir import Node, Value
from clika_ref.core.rewriter import Skip, rule
from clika_ref_conformance.mutants.seeding import Catalogue, replace_rule

FAULTS = Catalogue("blind-passes", blind=True)

PASSES = ("passes",)


# Batch norm


@FAULTS.patch("fold-batch-norm", "the layer's own bias is not scaled", levels=PASSES)
def _(registry):
    original = fold_batch_norm.fold_bias

    def faulty(bias, *statistics, eps, dtype):
        shift = original(None, *statistics, eps=eps, dtype=torch.float64)
        return (shift if bias is None else shift + bias.double()).to(dtype)

    with patch.object(fold_batch_norm, "fold_bias", faulty):
        yield


@FAULTS.patch("fold-batch-norm", "all groups of a transposed convolution get the scales of the first", levels=PASSES)
def _(registry):
    original = fold_batch_norm.fold_weight

    def faulty(weight, gamma, var, *, eps, groups):
        if groups is not None:
            var = var[: weight.shape[1]].repeat(groups)
            gamma = None if gamma is None else gamma[: weight.shape[1]].repeat(groups)
        return original(weight, gamma, var, eps=eps, groups=groups)

    with patch.object(fold_batch_norm, "fold_weight", faulty):
        yield


@FAULTS.patch(
    "fold-batch-norm", "the folded weight overwrites the original, which other nodes may share", levels=PASSES
)
def _(registry):
    original = fold_batch_norm.fold_weight

    def faulty(weight, gamma, var, *, eps, groups):
        return weight.detach().copy_(original(weight, gamma, var, eps=eps, groups=groups))

    with patch.object(fold_batch_norm, "fold_weight", faulty):
        yield


# Duplicate nodes and constants


@FAULTS.patch("merge-common-subexpressions", "equal numbers are merged: 0.0 and -0.0", levels=PASSES)
def _(registry):
    original = merge_common_subexpressions.literal_key

    def faulty(item):
        return item if isinstance(item, int | float) else original(item)

    with patch.object(merge_common_subexpressions, "literal_key", faulty):
        yield


@FAULTS.patch("merge-common-subexpressions", "one of two identical outputs loses its name", levels=PASSES)
def _(registry):
    with patch.object(merge_common_subexpressions, "can_substitute", lambda graph, old, new: True):
        yield


@FAULTS.patch("merge-common-subexpressions", "attributes that are tuples are not compared", levels=PASSES)
def _(registry):
    original = merge_common_subexpressions.call_key

    def faulty(node):
        plain = {name: value for name, value in node.attrs.items() if not isinstance(value, tuple)}
        return original(Node(node.op, node.inputs, plain, node.origin)), tuple(value.type for value in node.outputs)

    with patch.object(merge_common_subexpressions, "call_key", faulty):
        yield


@FAULTS.rewrite("merge-common-subexpressions", "random calls are merged, too")
def _(original, graph, operators):
    random = {node.op: node.op.random for node in graph.nodes}
    for op in random:
        op.random = False
    try:
        original(graph, operators)
    finally:
        for op, was in random.items():
            op.random = was


@FAULTS.patch("merge-equal-constants", "only some bytes of large constants are compared", levels=PASSES)
def _(registry):
    with patch.object(merge_equal_constants, "_digest", merge_equal_constants._sample):
        yield


@FAULTS.patch("fold-constants", "tensors that a call overwrites are treated as constant", levels=PASSES)
def _(registry):
    original = fold_constants._Folding.__init__

    def faulty(self, graph, limit_bytes, may_read, *rest):
        original(self, graph, limit_bytes, lambda value: True, *rest)

    with patch.object(fold_constants._Folding, "__init__", faulty):
        yield


# Chains and no-op calls


@FAULTS.patch("merge-chains", "float32 is assumed to represent every int32", levels=PASSES)
def _(registry):
    with patch.dict(merge_chains.FLOAT_BITS, {torch.float32: (8, 32)}):
        yield


@FAULTS.patch("merge-chains", "two permutations are composed in the wrong order", levels=PASSES)
def _(registry):
    @rule("permute")
    def merge_permutes(node, build):
        match node.inputs[0]:
            case Value(producer=Node("permute", (Value() as x,), {"dims": first})):
                second = [d % len(first) for d in node.attrs["dims"]]
                dims = tuple(second[d] for d in first)
                return x if dims == tuple(range(len(first))) else build("permute", x, dims=dims)
        return Skip("its operand is not a permute")

    with replace_rule(merge_chains, "merge_permutes", merge_permutes):
        yield


@FAULTS.patch("remove-identities", "a roll or pad whose amounts add up to 0 is removed", levels=PASSES)
def _(registry):
    @rule("roll", "pad")
    def remove_idle_move(node, build):
        amounts = node.attrs.get("shifts", node.attrs.get("pad"))
        idle = all(isinstance(a, int) for a in amounts) and sum(amounts) == 0
        return remove_identities._same_type(node.inputs[0], node) if idle else Skip("it moves elements")

    with replace_rule(remove_identities, "remove_idle_move", remove_idle_move):
        yield


@FAULTS.patch("remove-identities", "a division by 1 is removed, although it rounds", levels=PASSES)
def _(registry):
    original = remove_identities.remove_neutral_operand.rewrite

    @rule("add", "sub", "mul", "div", "pow")
    def remove_neutral_operand(node, build):
        match node.op_type, node.inputs:
            case "div", (Value() as x, 1 | 1.0):
                return remove_identities._same_type(x, node)
        return original(node, build)

    with replace_rule(remove_identities, "remove_neutral_operand", remove_neutral_operand):
        yield


@FAULTS.patch("remove-identities", "a number minus a tensor is treated as neutral: 0 - x becomes x", levels=PASSES)
def _(registry):
    original = remove_identities.remove_neutral_operand.rewrite

    @rule("add", "sub", "mul", "div", "pow")
    def remove_neutral_operand(node, build):
        match node.op_type, node.inputs:
            case "sub", (0 | 0.0, Value() as x) if node.attrs["alpha"] == 1:
                return remove_identities._same_type(x, node)
        return original(node, build)

    with replace_rule(remove_identities, "remove_neutral_operand", remove_neutral_operand):
        yield


# Transposes


@FAULTS.patch("push-transposes", "two permutations are composed in the wrong order", levels=PASSES)
def _(registry):
    with patch.object(push_transposes, "compose_orders", lambda first, second: tuple(second[d] for d in first)):
        yield


@FAULTS.patch("push-transposes", "the dims of an attribute are mapped by the inverse permutation", levels=PASSES)
def _(registry):
    original = push_transposes.permute_attrs
    with patch.object(
        push_transposes, "permute_attrs", lambda n, order: original(n, push_transposes.invert_order(order))
    ):
        yield


@FAULTS.patch("push-transposes", "a roll of the flattened tensor is treated as a roll along dims", levels=PASSES)
def _(registry):
    original = push_transposes.operands_to_permute

    def faulty(node):
        flat = node.op_type == "roll" and not node.attrs["dims"] and node.output.type.rank > 1
        return (0,) if flat else original(node)

    with patch.object(push_transposes, "operands_to_permute", faulty):
        yield


# Dtypes that are too narrow


@FAULTS.patch("merge-chains", "uint8 is assumed to represent every int8", levels=PASSES)
def _(registry):
    with patch.dict(merge_chains.INTEGER_BITS, {torch.uint8: (1, 8)}):
        yield


@FAULTS.patch("fold-batch-norm", "a weight that overflows in its dtype after scaling is folded, too", levels=PASSES)
def _(registry):
    with patch.object(fold_batch_norm, "_is_finite_after_folding", lambda weight, scale, shift: True):
        yield
