"""Functionalize in-place writes: track the traced tensors that share memory, and propagate each write to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from clika_ref.capture.aten_schemas import find_written_arguments
from clika_ref.capture.saved_tensors import storage_id
from clika_ref.core.errors import ModelError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Value
from clika_ref.core.operators import Operator
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.operators import OpOverload, get_schema

aten = torch.ops.aten


@dataclass(eq=False)
class VersionedMemory:
    """A block of memory that the model writes; ``version`` counts the writes so far."""

    version: int = 0


@dataclass(eq=False)
class TracedTensor:
    """A traced tensor: its value at ``version`` of its memory, and the view that created it from ``parent``."""

    value: Value
    memory: VersionedMemory | None = None
    version: int = 0
    parent: TracedTensor | None = None
    view: tuple[Operator, tuple[Any, ...], dict[str, Any], int] | None = None
    """The operator, its other operands, its attributes, and the index of this output."""
    sibling_types: tuple[TensorType, ...] = ()
    """The types of all outputs of that operator."""
    other_part: TracedTensor | None = None
    """The other part of a complex tensor that owns its memory."""
    is_copy: bool = False
    """Whether the graph computes a view of written memory as a tensor of its own, so that no write reaches it."""


class AliasTracker:
    """Tracks memory through the trace. Fake tensors share storage exactly if real tensors would.

    A write through a view becomes a new value of the base (by the operator's ``write_back``). Other views of the same
    memory are computed again at their next read.
    """

    def __init__(self, builder: Callable[[], Builder]) -> None:
        self._written: set[int] = set()
        self._builder = builder
        self._memories: dict[int, VersionedMemory] = {}
        self._programs: list[fx.GraphModule] = []

    def track(self, program: fx.GraphModule) -> None:
        """Find the memory that a program writes. Call this before importing the program."""
        self._programs.append(program)  # keep the program alive: the identity of freed memory could be reused
        self._written |= find_written_storages(program)

    def root(self, value: Value, fake: Any) -> TracedTensor:
        """Return the entry of a tensor that owns its memory."""
        key = storage_id(fake)
        if key not in self._written:
            return TracedTensor(value)
        memory = self._memories.setdefault(key, VersionedMemory())
        return TracedTensor(value, memory, memory.version)

    def result(
        self,
        value: Value,
        fake: Any,
        operands: list[tuple[Any, TracedTensor]],
        view: tuple[Operator, tuple[Any, ...], dict[str, Any], int],
    ) -> TracedTensor:
        """Return the entry of a call's result: a view if it shares memory with an operand."""
        key = storage_id(fake)
        if key not in self._written:
            return TracedTensor(value)
        for operand_fake, operand in operands:
            if storage_id(operand_fake) == key and operand.memory is not None:
                assert value.producer is not None
                siblings = tuple(v.type for v in value.producer.outputs)
                return TracedTensor(value, operand.memory, operand.memory.version, operand, view, siblings)
        return self.root(value, fake)

    def adopt_result(self, entry: TracedTensor, fake: Any, operands: list[Any]) -> TracedTensor:
        """Return the entry of a decomposition's result as the result of the original call.

        The decomposition has its own fake tensors. The rest of the trace knows the memory of a new tensor by another
        identity, while a view of an operand shares the operand's memory.
        """
        if storage_id(fake) in map(storage_id, operands):
            return self._mark_copy(entry, fake)
        return self.root(self.current_value(entry), fake)

    def _mark_copy(self, entry: TracedTensor, fake: Any) -> TracedTensor:
        """Return the entry of a view; one that the graph computes apart from its memory is only valid until a write."""
        memory = self._memories.get(storage_id(fake))
        if entry.memory is not None or memory is None:
            return entry
        return TracedTensor(entry.value, memory, memory.version, is_copy=True)

    def track_parts(self, program: fx.GraphModule, fakes: Sequence[Any]) -> None:
        """Find the inputs of a program that are parts of written memory; ``fakes`` holds a tensor for each input."""
        for placeholder, fake in zip(program.graph.find_nodes(op="placeholder"), fakes, strict=True):
            if storage_id(fake) in self._written:
                self._written.add(storage_id(placeholder.meta["val"]))

    def root_parts(self, parts: Sequence[Value], fake: Any) -> list[TracedTensor]:
        """Return the entries of the parts of a complex tensor that owns its memory."""
        entries = [self.root(part, fake) for part in parts]
        if entries[0].memory is not None:
            entries[0].other_part, entries[1].other_part = entries[1], entries[0]
        return entries

    def adopt_parts(self, parts: Sequence[TracedTensor], fake: Any, operands: list[Any]) -> list[TracedTensor]:
        """Return the entries of a complex result of a call from those of its parts, as `adopt_result`."""
        if storage_id(fake) in map(storage_id, operands):
            return [self._mark_copy(part, fake) for part in parts]
        return self.root_parts([self.current_value(part) for part in parts], fake)

    def is_noop(self, node: fx.Node) -> bool:
        """Whether a call returns its input tensor itself."""
        target: Any = node.target
        if target.overloadpacket in DROPOUT_OVERLOADS:  # tracers return a new tensor for these
            names = (argument.name for argument in get_schema(target).arguments)
            arguments: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            return (not arguments["train"] or arguments["p"] == 0) and storage_id(node.meta["val"]) not in self._written
        return _returns_input(node)

    def current_value(self, entry: TracedTensor) -> Value:
        """Return the current value of a tensor, after all writes so far.

        Raises:
            ModelError: it shares the memory of a written tensor, but is not a view of it.
        """
        if entry.memory is None or entry.version == entry.memory.version:
            return entry.value
        if entry.is_copy:
            raise ModelError(
                "a result of view_as_real, conj or imag is read after a write to the same memory. Clone it."
            )
        if entry.parent is None:
            raise ModelError(
                f"{entry.value.name!r} shares memory with another parameter, buffer or tensor that forward writes to. "
                "Keep one of them, and compute the other in forward as a view of it."
            )
        assert entry.view is not None
        op, others, attrs, index = entry.view
        made = self._builder()(op, self.current_value(entry.parent), *others, types=entry.sibling_types, **attrs)
        entry.value = made[index] if isinstance(made, tuple) else made
        entry.version = entry.memory.version
        return entry.value

    def write(self, entry: TracedTensor, new: Value) -> None:
        """Set a new value for a tensor, its base and all other views of the base.

        Raises:
            ModelError: the write goes through a view without a ``write_back`` rule, or to a tensor that the graph
                computes apart from its memory.
        """
        assert entry.memory is not None
        if entry.is_copy:
            raise ModelError(
                "an in-place write to a result of view_as_real, conj or imag is not supported. Write to the complex "
                "tensor instead."
            )
        if entry.parent is None:
            if entry.other_part is not None and entry.other_part.version == entry.memory.version:
                entry.other_part.version += 1
            entry.memory.version += 1
        else:
            assert entry.view is not None
            op, _, attrs, index = entry.view
            if op.write_back_rule is None:
                raise ModelError(
                    f"an in-place write through the view made by {op.name} is not supported. Write to its base instead."
                )
            base = self.current_value(entry.parent)
            keyword = {"index": index} if len(entry.sibling_types) > 1 else {}
            self.write(entry.parent, op.write_back_rule(self._builder(), base, new, **attrs, **keyword))
        entry.value = new
        entry.version = entry.memory.version


CONDITIONAL_NOOPS = frozenset(
    getattr(aten, name)
    for name in ["to", "type_as", "contiguous", "flatten", "positive", "real", "resolve_conj", "resolve_neg"]
    + [f"atleast_{rank}d" for rank in (1, 2, 3)]
)
"""Calls that return their input itself, not a view of it, if they have nothing to do."""

STATISTICS_WRITERS = frozenset({aten.batch_norm.default, aten.instance_norm.default, aten.native_batch_norm.default})
"""Calls that write their operands 3 and 4 in training, which their schemas do not declare."""

DROPOUT_OVERLOADS = frozenset({aten.dropout, aten.alpha_dropout, aten.feature_dropout, aten.feature_alpha_dropout})
"""Calls that return their input itself outside training."""


def _returns_input(node: fx.Node) -> bool:
    """Whether a call returns its input because it has nothing to do.

    A trace knows a tensor of an attribute by a new fake tensor after each write, so that memory does not decide ``to``.
    """
    target: Any = node.target
    if node.op != "call_function" or getattr(target, "overloadpacket", None) not in CONDITIONAL_NOOPS:
        return False
    made, given = node.meta["val"], node.all_input_nodes[0].meta["val"]
    if _is_same_tensor(made, given):
        return True
    if target.overloadpacket is not aten.to or not all(isinstance(x, torch.Tensor) for x in (made, given)):
        return False
    names = (argument.name for argument in get_schema(target).arguments)
    options: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    is_free = not options.get("copy") and options.get("memory_format") in (None, torch.preserve_format)
    return is_free and (made.dtype, made.device, made.layout) == (given.dtype, given.device, given.layout)


def _is_same_tensor(made: Any, given: Any) -> bool:
    """Whether two traced tensors share memory, dtype and sizes; checked without adding a guard."""
    if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    facts = ((t.dtype, t.dim(), storage_id(t)) for t in (made, given))
    return next(facts) == next(facts) and statically_known_true(sym_eq(made.shape, given.shape))


def find_written_storages(program: fx.GraphModule) -> set[int]:
    """Return the identities of all storages that a call of the program writes."""
    found: set[int] = set()
    for module in program.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                written = find_written_arguments(node.target, node.args, node.kwargs)
                targets = [*written, *(node.args[3:5] if node.target in STATISTICS_WRITERS else ())]
                for written_node in (t for t in targets if isinstance(t, fx.Node)):
                    found.update(storage_id(same.meta.get("val")) for same in _iterate_sources(written_node))
    return found - {0}


def _iterate_sources(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node, and the nodes before it that return the same tensor."""
    yield node
    while _returns_input(node):
        node = node.all_input_nodes[0]
        yield node
