"""Faulty passes, written without knowledge of the graphs and tests that must find them."""

from __future__ import annotations

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
from clika_ref.core.rewriter import Skip
from clika_ref_conformance.mutants.passes import ignore_randomness
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("blind-passes", blind=True)


# Batch norm


@FAULTS.function("fold-batch-norm", "the layer's own bias is not scaled", fold_batch_norm, "fold_bias")
def _(original, bias, *statistics, eps, dtype):
    shift = original(None, *statistics, eps=eps, dtype=torch.float64)
    return (shift if bias is None else shift + bias.double()).to(dtype)


@FAULTS.function(
    "fold-batch-norm",
    "all groups of a transposed convolution get the scales of the first",
    fold_batch_norm,
    "fold_weight",
)
def _(original, weight, gamma, var, *, eps, groups):
    if groups is not None:
        var = var[: weight.shape[1]].repeat(groups)
        gamma = None if gamma is None else gamma[: weight.shape[1]].repeat(groups)
    return original(weight, gamma, var, eps=eps, groups=groups)


@FAULTS.function(
    "fold-batch-norm",
    "the folded weight overwrites the original, which other nodes may share",
    fold_batch_norm,
    "fold_weight",
)
def _(original, weight, gamma, var, *, eps, groups):
    return weight.detach().copy_(original(weight, gamma, var, eps=eps, groups=groups))


# Duplicate nodes and constants


@FAULTS.function(
    "merge-common-subexpressions", "equal numbers are merged: 0.0 and -0.0", merge_common_subexpressions, "literal_key"
)
def _(original, item):
    return item if isinstance(item, int | float) else original(item)


FAULTS.substitute(
    "merge-common-subexpressions",
    "one of two identical outputs loses its name",
    merge_common_subexpressions,
    "can_substitute",
    lambda graph, old, new: True,
)


@FAULTS.function(
    "merge-common-subexpressions",
    "attributes that are tuples are not compared",
    merge_common_subexpressions,
    "call_key",
)
def _(original, node):
    plain = {name: value for name, value in node.attrs.items() if not isinstance(value, tuple)}
    return original(Node(node.op, node.inputs, plain, node.origin)), tuple(value.type for value in node.outputs)


FAULTS.rewrite("merge-common-subexpressions", "random calls are merged, too")(ignore_randomness)


FAULTS.substitute(
    "merge-equal-constants",
    "only some bytes of large constants are compared",
    merge_equal_constants,
    "_compute_digest",
    merge_equal_constants._read_sample,
)


@FAULTS.function(
    "fold-constants", "tensors that a call overwrites are treated as constant", fold_constants._Folding, "__init__"
)
def _(original, self, graph, limit_bytes, may_read, *rest, **more):
    original(self, graph, limit_bytes, lambda value: True, *rest, **more)


# Chains and no-op calls


FAULTS.substitute(
    "merge-chains",
    "float32 is assumed to represent every int32",
    merge_chains,
    "FLOAT_BITS",
    {**merge_chains.FLOAT_BITS, torch.float32: (8, 32)},
)


@FAULTS.rule("merge-chains", "two permutations are composed in the wrong order", merge_chains, "merge_permutes")
def _(original, node, build):
    match node.inputs[0]:
        case Value(producer=Node("permute", (Value() as x,), {"dims": first})):
            second = [d % len(first) for d in node.attrs["dims"]]
            dims = tuple(second[d] for d in first)
            return x if dims == tuple(range(len(first))) else build("permute", x, dims=dims)
    return Skip("its operand is not a permute")


@FAULTS.rule(
    "remove-identities", "a roll or pad whose amounts add up to 0 is removed", remove_identities, "remove_idle_move"
)
def _(original, node, build):
    amounts = node.attrs.get("shifts", node.attrs.get("pad"))
    if amounts is None:
        return original(node, build)
    idle = all(isinstance(a, int) for a in amounts) and sum(amounts) == 0
    return remove_identities._return_if_same_type(node.inputs[0], node) if idle else Skip("it moves elements")


@FAULTS.rule(
    "remove-identities",
    "a division by 1 is removed, although it rounds",
    remove_identities,
    "remove_neutral_operand",
)
def _(original, node, build):
    match node.op_type, node.inputs:
        case "div", (Value() as x, 1 | 1.0):
            return remove_identities._return_if_same_type(x, node)
    return original(node, build)


@FAULTS.rule(
    "remove-identities",
    "a number minus a tensor is treated as neutral: 0 - x becomes x",
    remove_identities,
    "remove_neutral_operand",
)
def _(original, node, build):
    match node.op_type, node.inputs:
        case "sub", (0 | 0.0, Value() as x) if node.attrs["alpha"] == 1:
            return remove_identities._return_if_same_type(x, node)
    return original(node, build)


# Transposes


FAULTS.substitute(
    "push-transposes",
    "two permutations are composed in the wrong order",
    push_transposes,
    "compose_orders",
    lambda first, second: tuple(second[d] for d in first),
)


@FAULTS.function(
    "push-transposes",
    "the dims of an attribute are mapped by the inverse permutation",
    push_transposes,
    "permute_attrs",
)
def _(original, node, order):
    return original(node, push_transposes.invert_order(order))


@FAULTS.function(
    "push-transposes",
    "a roll of the flattened tensor is treated as a roll along dims",
    push_transposes,
    "operands_to_permute",
)
def _(original, node):
    flat = node.op_type == "roll" and not node.attrs["dims"] and node.output.type.rank > 1
    return (0,) if flat else original(node)


# Dtypes that are too narrow


FAULTS.substitute(
    "merge-chains",
    "uint8 is assumed to represent every int8",
    merge_chains,
    "INTEGER_BITS",
    {**merge_chains.INTEGER_BITS, torch.uint8: (1, 8)},
)


FAULTS.substitute(
    "fold-batch-norm",
    "a weight that overflows in its dtype after scaling is folded, too",
    fold_batch_norm,
    "_is_finite_after_folding",
    lambda weight, scale, shift: True,
)
