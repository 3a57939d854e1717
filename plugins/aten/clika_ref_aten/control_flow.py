"""Control flow: conditions and loops, which run the bodies of their nodes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.types import Number

from clika_ref.core.errors import ModelError
from clika_ref.core.operators import Body, operator
from clika_ref.core.symbols import is_symbolic


@operator()
def cond(
    predicate: Tensor | Number, *operands: Tensor | Number, when_true: Body, when_false: Body
) -> tuple[Tensor, ...]:
    """Return the results of ``when_true`` on ``operands`` if ``predicate``, of one element, is true, else the other's.

    Source: torch/_higher_order_ops/cond.py
    """
    if isinstance(predicate, Tensor):
        _reject_export("condition")
    return (when_true if predicate else when_false)(*operands)


def _reject_export(kind: str) -> None:
    """Raise during torch.export, which does not know the values of tensors."""
    if torch.compiler.is_exporting():
        raise ModelError(
            f"a ClikaModule with a {kind} on values of tensors cannot be part of another model that is compiled. "
            "Compile the whole model, with its original modules."
        )


@cond.onnx
def _(op, predicate, *operands, when_true, when_false):
    branches = {}
    for name, body in (("then_branch", when_true), ("else_branch", when_false)):
        with op.subgraph() as branch:
            branches[name] = branch.finish(body(*operands), body.output_types)
    return op.If(_to_condition(op, predicate), **branches, outputs=len(op.results))


def _to_condition(op, predicate):
    """Return a predicate as a 0-d bool."""
    value = op.like_scalar(predicate, torch.bool)
    is_scalar = value is not predicate or op.rank(value) == 0  # a number becomes a 0-d value
    return value if is_scalar else op.declare(op.Reshape(value, op.ints([])), torch.bool)


@operator()
def while_loop(*operands: Tensor | Number, carried: int, condition: Body, body: Body) -> tuple[Tensor, ...]:
    """Replace the first ``carried`` operands by the results of ``body`` while ``condition`` is true; return them.

    Both bodies take all operands.

    Source: torch/_higher_order_ops/while_loop.py
    """
    _reject_export("loop")
    state, others = tuple(map(torch.as_tensor, operands[:carried])), operands[carried:]
    while condition(*state, *others)[0]:
        state = body(*state, *others)
    return state


@while_loop.onnx
def _(op, *operands, carried, condition, body):
    state = [op.like_scalar(x, t.dtype) for x, t in zip(operands[:carried], body.input_types, strict=False)]
    others = operands[carried:]
    (first,) = condition(*state, *others)
    with op.subgraph() as loop:
        loop.add_input(torch.int64, ())
        loop.add_input(torch.bool, ())
        current = [loop.add_input(t.dtype, t.shape) for t in body.input_types[:carried]]
        following = body(*current, *others)
        (again,) = condition(*following, *others)
        graph = loop.finish((again, *following), (*condition.output_types, *body.output_types))
    return op.Loop(None, first, *state, body=graph, outputs=carried)


@operator()
def scan(*operands: Tensor | Number, carried: int, scanned: int, body: Body) -> tuple[Tensor, ...]:
    """Run ``body`` on each row of ``scanned`` operands; return the last carried values, and stacked other results.

    The first ``carried`` operands are replaced by the first results of each run. Then follow the scanned operands, by
    rows along dim 0, and operands that each run gets unchanged.

    Source: torch/_higher_order_ops/scan.py
    """
    state = tuple(map(torch.as_tensor, operands[:carried]))
    rows, others = operands[carried : carried + scanned], operands[carried + scanned :]
    found: list[tuple[Tensor, ...]] = []
    for row in zip(*map(torch.as_tensor, rows), strict=True):
        results = body(*state, *row, *others)
        state = results[:carried]
        found.append(results[carried:])
    if not found:  # the body shows the types of the results
        row = [x.new_zeros(x.shape[1:]) for x in map(torch.as_tensor, rows)]
        return (*state, *(x.new_empty((0, *x.shape)) for x in body(*state, *row, *others)[carried:]))
    return (*state, *(torch.stack(column) for column in zip(*found, strict=True)))


@scan.onnx
def _(op, *operands, carried, scanned, body):
    # OpenVINO's Scan reads only constants from outside, so other values become state that each step returns unchanged.
    types = body.input_types
    values = [op.like_scalar(x, t.dtype) for x, t in zip(operands, types, strict=True)]
    kept = [i for i in range(carried + scanned, len(values)) if not op.is_constant(values[i])]
    with op.subgraph(is_closed=True) as step:
        inner = dict(enumerate(values))
        for i in (*kept, *range(carried + scanned)):
            inner[i] = step.add_input(types[i].dtype, types[i].shape)
        results = [*(inner[i] for i in kept), *body(*inner.values())]
        graph = step.finish(results, [*(types[i] for i in kept), *body.output_types])
    given = [values[i] for i in (*kept, *range(carried + scanned))]
    results = [*(types[i] for i in (*kept, *range(carried))), *op.results[carried:]]
    return scan_rows(op, given, graph, scanned, results)[len(kept) :]


def scan_rows(op, given, body, scanned, types, count=None):
    """Return the results of ONNX's ``Scan``, of the given types; without rows, the states and empty results.

    ``count`` is the number of rows, if the last of ``given`` is an intermediate, with a shape that is unknown.

    Runtimes reject a ``Scan`` without rows. An ``If`` skips it if there may be none, such as for a length minus 1.
    """

    def run():
        made = op.Scan(*given, body=body, num_scan_inputs=scanned, outputs=len(types))
        return made if isinstance(made, tuple) else (made,)

    def skip():
        return [*states, *(op.Expand(op.scalar(0, t.dtype), op.ints(t.shape)) for t in types[len(states) :])]

    states, count = given[: len(given) - scanned], op.shape(given[-1])[0] if count is None else count
    if not is_symbolic(count) or not op.sizes.may_be_zero(count):
        return skip() if count == 0 else run()
    with op.subgraph() as full:
        some = full.finish(run(), types)
    with op.subgraph() as empty:
        none = empty.finish(skip(), types)
    has_rows = op.Greater(op.Reshape(op.ints([count]), op.ints([])), op.scalar(0, torch.int64))
    made = op.If(has_rows, then_branch=some, else_branch=none, outputs=len(types))
    return made if isinstance(made, tuple) else (made,)
