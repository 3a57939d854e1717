"""Faults of the pass that moves permutations through graphs."""

from __future__ import annotations

import clika_ref_cleanup.push_transposes as transposes
from clika_ref_cleanup import layouts

from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("transposes")


@FAULTS.function("push-transposes", "dims in attributes are not permuted", transposes, "permute_attrs")
def _(original, node, order):
    return node.attrs


@FAULTS.function("push-transposes", "permutations are assumed to be their own inverse", transposes, "invert_order")
def _(original, order):
    return order


FAULTS.substitute(
    "push-transposes",
    "a cumulative sum is treated as elementwise",
    layouts,
    "LAYOUT_AGNOSTIC",
    layouts.LAYOUT_AGNOSTIC | {"cumsum"},
)


@FAULTS.rule("push-transposes", "the order of the remaining dims is not compared", transposes, "reduce_before_permute")
def _(original, node, build):
    x, dims = node.inputs[0], layouts.dims_of(node)
    order = layouts.order_of(x.producer)
    if order is None or dims is None or node.attrs["keepdim"] or len(x.uses) != 1:
        return original(node, build)
    return build(node.op, x.producer.inputs[0], types=(node.output.type,), **layouts.permute_attrs(node, order))


@FAULTS.function(
    "push-transposes", "a norm over several dims is treated as one over the last", transposes, "operands_to_permute"
)
def _(original, node):
    return (0,) if node.op_type in layouts.LAST_DIM_OPERATORS else original(node)


@FAULTS.function(
    "push-transposes",
    "constants of lower rank are permuted from their first dim",
    transposes._RegionRewriter,
    "_entry",
)
def _(original, self, value, order, inside, build):
    short = len(order) - value.type.rank
    if not short or value.data is None or not self._is_cheap(value):
        return original(self, value, order, inside, build)
    full = value.data.detach().reshape(tuple(value.data.shape) + (1,) * short)
    return build.constant(full.permute(layouts.invert_order(order)).contiguous(), value.name)


@FAULTS.function(
    "push-transposes", "an input of another permutation is permuted back first", transposes._RegionRewriter, "_entry"
)
def _(original, self, value, order, inside, build):
    first = layouts.order_of(value.producer)
    if first is None or value.producer.inputs[0].producer in inside:
        return original(self, value, order, inside, build)
    twisted = layouts.compose_orders(layouts.invert_order(order), first)
    return transposes._add_permute(value.producer.inputs[0], twisted, build)


@FAULTS.function(
    "push-transposes",
    "an input from inside the region is permuted in the wrong order",
    transposes._RegionRewriter,
    "_entry",
)
def _(original, self, value, order, inside, build):
    first = layouts.order_of(value.producer)
    if first is None or value.producer.inputs[0].producer not in inside:
        return original(self, value, order, inside, build)
    source = self.moved[value.producer.inputs[0]]
    return transposes._add_permute(
        source, layouts.compose_orders(layouts.compose_orders(layouts.invert_order(order), first), order), build
    )


@FAULTS.function(
    "push-transposes", "constants that calls overwrite are permuted in advance", transposes._RegionRewriter, "_is_cheap"
)
def _(original, self, value):
    is_state = value.deferred_data is None and value.data is not None and value.name in self.graph.state
    return is_state or original(self, value)
