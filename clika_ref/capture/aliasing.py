"""In-place writes made functional: which traced tensors share memory, and what a write to one does to the others."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from clika_ref.capture.calls import written_arguments
from clika_ref.core.errors import ModelError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Value
from clika_ref.core.operators import Operator
from clika_ref.core.types import TensorType

aten = torch.ops.aten


@dataclass(eq=False)
class Memory:
    """One piece of memory that is written somewhere in the model; ``version`` counts the writes so far."""

    version: int = 0


@dataclass(eq=False)
class Traced:
    """A traced tensor: its value as of ``version`` of its memory, and the view that made it from ``parent``."""

    value: Value
    memory: Memory | None = None
    version: int = 0
    parent: Traced | None = None
    view: tuple[Operator, tuple[Any, ...], dict[str, Any], int] | None = None
    """The operator, its other operands, its attributes, and which of its outputs this is."""
    siblings: tuple[TensorType, ...] = ()
    """The types of all outputs of that operator."""


class Aliases:
    """Follows memory through the trace. Fake tensors share storage exactly where real ones would.

    A write through a view becomes a new value of the base (by the operator's ``write_back``); other views of the same
    memory are computed anew when they are next read.
    """

    def __init__(self, builder: Callable[[], Builder]) -> None:
        self._written: set[int] = set()
        self._builder = builder
        self._memories: dict[int, Memory] = {}
        self._programs: list[fx.GraphModule] = []

    def track(self, program: fx.GraphModule) -> None:
        """Find the memory that a program writes; must precede its import."""
        self._programs.append(program)  # memory that is freed would lend its identity to another
        self._written |= _written_memory(program)

    def root(self, value: Value, fake: Any) -> Traced:
        """Return the entry of a tensor that owns its memory."""
        key = storage_of(fake)
        if key not in self._written:
            return Traced(value)
        memory = self._memories.setdefault(key, Memory())
        return Traced(value, memory, memory.version)

    def result(
        self,
        value: Value,
        fake: Any,
        operands: list[tuple[Any, Traced]],
        view: tuple[Operator, tuple[Any, ...], dict[str, Any], int],
    ) -> Traced:
        """Return the entry of what a call made: a view where it shares memory with an operand."""
        key = storage_of(fake)
        if key not in self._written:
            return Traced(value)
        for operand_fake, operand in operands:
            if storage_of(operand_fake) == key and operand.memory is not None:
                assert value.producer is not None
                siblings = tuple(v.type for v in value.producer.outputs)
                return Traced(value, operand.memory, operand.memory.version, operand, view, siblings)
        return self.root(value, fake)

    def adopted(self, entry: Traced, fake: Any, operands: list[Any]) -> Traced:
        """Return the entry of a result of the program that a call was decomposed into, as the call's own result.

        The program has tensors of its own: what it made lies in memory that the rest of the trace knows by another
        identity, while a view of an operand shares the operand's.
        """
        if storage_of(fake) in map(storage_of, operands):
            return entry
        return self.root(self.current(entry), fake)

    def current(self, entry: Traced) -> Value:
        """Return the value of a tensor now, after all writes so far.

        Raises:
            ModelError: it is no view of what was written to, but lies in the same memory.
        """
        if entry.memory is None or entry.version == entry.memory.version:
            return entry.value
        if entry.parent is None:
            msg = (
                f"{entry.value.name!r} lies in the memory of another parameter, buffer or tensor that forward writes "
                "to; keep one of them, and take the other as a view of it in forward"
            )
            raise ModelError(msg)
        assert entry.view is not None
        op, others, attrs, index = entry.view
        made = self._builder()(op, self.current(entry.parent), *others, types=entry.siblings, **attrs)
        entry.value = made[index] if isinstance(made, tuple) else made
        entry.version = entry.memory.version
        return entry.value

    def write(self, entry: Traced, new: Value) -> None:
        """Let a tensor, and thereby its base and all other views of it, hold a new value.

        Raises:
            ModelError: the write goes through a view that cannot be undone.
        """
        assert entry.memory is not None
        if entry.parent is None:
            entry.memory.version += 1
        else:
            assert entry.view is not None
            op, _, attrs, index = entry.view
            if op.write_back_rule is None:
                msg = (
                    f"an in-place write through the view made by {op.name} is not supported; write to its base instead"
                )
                raise ModelError(msg)
            base = self.current(entry.parent)
            which = {"index": index} if len(entry.siblings) > 1 else {}
            self.write(entry.parent, op.write_back_rule(self._builder(), base, new, **attrs, **which))
        entry.value = new
        entry.version = entry.memory.version


def storage_of(fake: Any) -> int:
    """Return the identity of the memory of a tensor."""
    return fake.untyped_storage()._cdata if isinstance(fake, torch.Tensor) else 0


MAY_BE_IDLE = frozenset(
    getattr(torch.ops.aten, name)
    for name in ["to", "type_as", "contiguous", "flatten", "positive", "real", "resolve_conj", "resolve_neg"]
    + [f"atleast_{rank}d" for rank in (1, 2, 3)]
)
"""Calls that return what they are given, itself and no view of it, where they have nothing to do."""


def returned_inputs(program: fx.GraphModule) -> list[int | None]:
    """Return which input each result of a program is, None of what it makes."""
    inputs: dict[Any, int] = {node: i for i, node in enumerate(program.graph.find_nodes(op="placeholder"))}
    results: Any = program.graph.output_node().args[0]
    return [inputs.get(_itself(node)) for node in results]


def _itself(node: Any) -> Any:
    """Return the node whose very tensor another one returns: an idle call, one that writes, or a region around them."""
    if getattr(node.target, "overloadpacket", None) in MAY_BE_IDLE:
        made, given = ((t.dtype, t.shape, storage_of(t)) for t in (node.meta["val"], node.args[0].meta["val"]))
        return _itself(node.args[0]) if made == given else node
    if isinstance(node.target, torch._ops.OpOverload) and node.target._opname.endswith("_"):
        return _itself(node.args[0])  # what it writes to, by PyTorch's way of naming
    if node.target is python_operator.getitem and isinstance(node.args[0].target, torch._ops.HigherOrderOperator):
        region, index = node.args
        at, inner = next((i, arg) for i, arg in enumerate(region.args) if getattr(arg, "op", None) == "get_attr")
        which = returned_inputs(getattr(node.graph.owning_module, inner.target))[index]
        return node if which is None else _itself(region.args[at + 1 + which])
    return node


def _written_memory(program: fx.GraphModule) -> set[int]:
    """Return the identities of all memory that some call writes."""
    found: set[int] = set()
    for module in program.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                written = written_arguments(node.target, node.args, node.kwargs)
                norm = node.target in (aten.batch_norm.default, aten.instance_norm.default)
                targets = [*written, *(node.args[3:5] if norm else ())]
                found.update(storage_of(t.meta.get("val")) for t in targets if isinstance(t, fx.Node))
    return found - {0}
