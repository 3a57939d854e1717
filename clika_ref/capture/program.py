"""Convert an exported program to a graph with a signature: inputs, constants, state, calls and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec

from clika_ref.capture.aliasing import TracedTensor
from clika_ref.capture.complex_entries import ComplexEntry, join_complex, split_complex
from clika_ref.capture.complex_functions import real_dtype
from clika_ref.capture.complex_numbers import has_complex_calls
from clika_ref.capture.control_flow import ControlFlowImporter
from clika_ref.capture.importer import OperatorFallback
from clika_ref.capture.messages import CaptureError, MismatchError, make_unsupported_error
from clika_ref.capture.saved_tensors import storage_id
from clika_ref.capture.signature import (
    ComplexLeaf,
    ConstantLeaf,
    Leaf,
    NumberLeaf,
    OutputLeaf,
    Signature,
    TensorLeaf,
    leaf_names,
)
from clika_ref.capture.surrounding_autocast import outside_autocast
from clika_ref.capture.symbols import SymbolTable, TracedGuard
from clika_ref.capture.traced_calls import TracedCalls
from clika_ref.capture.traced_floats import TracedFloat
from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.invariants import verify
from clika_ref.core.ir import Graph, Value, walk
from clika_ref.core.registry import Registry
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.modules import BATCH_NORM
from clika_ref.torch_internals.tensors import FakeTensor

LIFTED_PREFIX = "clika."
"""Prefix of constants created in ``forward``, as of all other names that the original model does not have."""


@dataclass
class TracedGraph:
    """A graph, its signature, and the guards of its trace."""

    graph: Graph
    signature: Signature
    guards: list[TracedGuard]


def import_program(
    program: torch.export.ExportedProgram,
    traced: TracedCalls,
    registry: Registry,
    *,
    name: str,
    fallback: OperatorFallback,
    detail: Callable[[str], None],
) -> TracedGraph:
    """Import one exported program. Its complex numbers become pairs of real ones, if all calls on them have a rule.

    Args:
        program: the program that a tracer returned.
        traced: the calls that it must serve.
        registry: the declared operators.
        name: the name of the graph.
        fallback: finds operators for undeclared ATen calls.
        detail: receives each line of the full log.

    Raises:
        ModelError: calls are unsupported; the message lists all of them.
        MismatchError: the program does not show a write of the model to a parameter or buffer.
    """

    def import_once(*, splits_complex: bool) -> TracedGraph:
        importer = ProgramImporter(program, traced, registry, name=name, fallback=fallback, detail=detail)
        importer.importer.splits_complex = splits_complex
        return importer.import_graph()

    if has_complex_calls(program.graph_module):
        try:
            return import_once(splits_complex=True)
        except ModelError as error:
            detail(f"Complex numbers stay complex: {error}")
    return import_once(splits_complex=False)


class ProgramImporter:
    """Imports one exported program; for its arguments see `import_program`."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        traced: TracedCalls,
        registry: Registry,
        *,
        name: str,
        fallback: OperatorFallback,
        detail: Callable[[str], None],
    ) -> None:
        self.program = program
        self.traced = traced
        self.graph = Graph(name)
        self.table = SymbolTable(self.graph)
        module = traced.callee.module
        inputs = (leaf for leaf in traced.comparison.calls[0] if isinstance(leaf, torch.Tensor))
        device = next((t.device for t in (*module.parameters(), *module.buffers(), *inputs)), None)
        self.importer = ControlFlowImporter(self.graph, self.table, registry, fallback, device)
        self.importer.detail = detail
        self.roots: dict[str, TracedTensor] = {}
        """The entry of each input and constant. Placeholders of tied parameters share one: they are the same tensor."""
        self._named: dict[Any, Value] = {}
        """The parameters and buffers by their memory."""

    @outside_autocast()
    def import_graph(self) -> TracedGraph:
        """Import the program. The graph contains the casts of autocast regions explicitly."""
        self.importer.aliases.track(self.program.graph_module)
        self._declare_state()
        leaves = self._declare_placeholders()
        outputs = self.importer.run(self.program.graph_module)
        if self.importer.unsupported:
            raise make_unsupported_error(self.traced.callee.name, self.importer.unsupported)
        signature = self._signature(leaves, outputs)
        for name, root in self.roots.items():
            if root.memory is not None and root.memory.version:
                self.graph.set_state(name, self.importer.value_of(root))
        self._mark_averaging_norms()
        self._check_writes()
        verify(self.graph)
        return TracedGraph(self.graph, signature, self.table.guards(self._find_shape_env()))

    def _mark_averaging_norms(self) -> None:
        """Restore ``momentum=None`` of modules: in eval mode they pass 0 to the function."""
        modules = self.traced.callee.module.named_modules(remove_duplicate=False)
        norms = [path for path, m in modules if isinstance(m, BATCH_NORM) and m.momentum is None]
        names = {f"{path}.running_mean".lstrip(".") for path in norms}
        means = {self.graph.aliases.get(name, name) for name in names}
        for node in walk(self.graph):
            if node.op_type == "batch_norm" and not node.attrs["training"]:
                mean = node.inputs[3]
                node.attrs["momentum"] = None if mean is not None and mean.name in means else node.attrs["momentum"]

    def _check_writes(self) -> None:
        written = {self.graph.aliases.get(name, name) for name in self.traced.written}
        missing = sorted(written - self.graph.state.keys())
        if missing:
            raise MismatchError(
                f"forward writes to {', '.join(missing)} in a way that this trace does not record, such as through "
                f".data. Write in place: with torch.no_grad(): self.{missing[0]}.copy_(...)"
            )

    def _declare_state(self) -> None:
        """Register every parameter and buffer, used or not, under its qualified name; tied ones only once."""
        module = self.traced.callee.module
        seen: dict[int, str] = {}
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            if id(tensor) in seen:
                self.graph.aliases[name] = seen[id(tensor)]
            else:
                seen[id(tensor)] = name
                self._named[_identify_memory(tensor)] = self.graph.add_constant(tensor, name)

    def _declare_placeholders(self) -> list[Leaf]:
        """Declare inputs and constants: all symbols before the types, as a size may use the symbol of a later input."""
        leaves: list[Leaf] = []
        names = iter(self.traced.comparison.names)
        given = iter(self.traced.comparison.calls[0])
        placeholders = self.program.graph.find_nodes(op="placeholder")
        inputs: list[tuple[fx.Node, Value]] = []
        for spec, node in zip(self.program.graph_signature.input_specs, placeholders, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                leaf, value = self._user_input(next(names), next(given), node)
                leaves.append(leaf)
                inputs += [(node, value)] if value is not None else []
            else:
                self._bind_root(node, self._constant(spec))
        for node, value in inputs:
            fake = node.meta["val"]
            shape = tuple(self.table.translate(d) for d in fake.shape)
            if self._is_split(fake):
                value.type = TensorType(real_dtype(fake.dtype), (*shape, 2))
                self.roots[value.name] = self.importer.aliases.root(value, fake)
                self.importer.bind(node, split_complex(self.roots[value.name], self.importer.builder()))
            else:
                value.type = TensorType(fake.dtype, shape)
                self._bind_root(node, value)
        return leaves

    def _is_split(self, fake: torch.Tensor) -> bool:
        """Whether a tensor becomes a pair of real ones."""
        return self.importer.splits_complex and fake.is_complex()

    def _bind_root(self, node: fx.Node, value: Value) -> None:
        if value.name not in self.roots:
            self.roots[value.name] = self.importer.aliases.root(value, node.meta["val"])
        self.importer.bind(node, self.roots[value.name])

    def _user_input(self, name: str, given: Any, node: fx.Node) -> tuple[Leaf, Value | None]:
        fake = node.meta["val"]
        if isinstance(fake, torch.Tensor):
            value = self.graph.add_input(TensorType(fake.dtype, ()), name)
            self.table.bind_input(value, fake)
            return (ComplexLeaf if self._is_split(fake) else TensorLeaf)(value.name), value
        if isinstance(fake, torch.SymInt):
            number = self.graph.add_input(TensorType(torch.int64, ()), name)
            self.table.bind_number(number, fake)
            self.importer.bind(node, self.table.translate(fake))
            return NumberLeaf(number.name), None
        self.importer.bind(node, given)
        return ConstantLeaf(name, given), None

    def _constant(self, spec: InputSpec) -> Value:
        target = str(spec.target)
        canonical = self.graph.aliases.get(target, target)
        if canonical in self.graph.constants:
            return self.graph.constants[canonical]
        data = self.program.constants.get(target)
        if data is None:
            data = self.program.state_dict[target]
        if not isinstance(data, torch.Tensor):
            kind = type(data).__name__
            msg = f"forward uses a {kind}, but a graph contains only tensors."
            if isinstance(data, torch.Generator):
                msg += " Draw without a generator: torch.manual_seed seeds the random numbers of a compiled module."
            raise ModelError(msg)
        if isinstance(data, FakeTensor):
            raise MismatchError(
                f"the tracer treated a result of the model as a constant ({tuple(data.shape)} in {target})"
            )
        named = self._named.get(_identify_memory(data)) if storage_id(data) else None
        if named is not None:  # a buffer, read as an attribute of another object: a cache
            return named
        return self.graph.add_constant(data.detach(), f"{LIFTED_PREFIX}{target}")

    def _signature(self, leaves: list[Leaf], outputs: Any) -> Signature:
        first = self.traced.expected[0]
        names = leaf_names(first.structure.unflatten(first.leaves))
        if len(outputs) != len(names):
            raise MismatchError(
                f"the model returns {format_count(len(names), 'value')} for input 1, but {len(outputs)} for the traced "
                "input. Return a fixed number of values."
            )
        described = [self._output(entry, name) for entry, name in zip(outputs, names, strict=True)]
        return Signature(
            self.traced.parameters,
            self.traced.arguments,
            self.traced.specs,
            tuple(leaves),
            first.structure,
            tuple(described),
            self.importer.autocast,
        )

    def _output(self, entry: Any, name: str) -> OutputLeaf:
        if isinstance(entry, TracedTensor | ComplexEntry):
            value = self._join(entry)
            is_complex = value is not None
            self.graph.add_output(self.importer.value_of(entry) if value is None else value)
            return OutputLeaf(len(self.graph.outputs) - 1, name=name, is_complex=is_complex)
        if self._is_read_from_tensor(entry):
            raise CaptureError(
                f"forward returns a number read from a tensor ({self._find_reading(entry)}). Return that tensor "
                "instead."
            )
        return OutputLeaf(None, int(entry) if isinstance(entry, sympy.Integer) else entry, name)

    def _join(self, entry: TracedTensor | ComplexEntry) -> Value | None:
        """Return a complex result as one real value; None for a real result."""
        if isinstance(entry, ComplexEntry):
            parts = [self.importer.value_of(part) for part in (entry.real, entry.imag)]
            return join_complex(parts, self.importer.builder())
        is_split = self.importer.splits_complex and entry.value.type.dtype.is_complex
        return self.importer.view_as_real(entry).value if is_split else None

    def _is_read_from_tensor(self, entry: Any) -> bool:
        """Whether a number depends on the elements of a tensor."""
        if isinstance(entry, sympy.Basic):
            return not self._list_input_symbols() >= {str(s) for s in entry.free_symbols}
        return isinstance(entry, TracedFloat)

    def _find_reading(self, entry: Any) -> str:
        """Return where a number is read from a tensor."""
        if isinstance(entry, TracedFloat):
            node = entry.value.producer
        else:
            known = self._list_input_symbols()
            read = {
                s.source.name for n, s in self.graph.symbols.items() if n not in known and s.expr in entry.free_symbols
            }
            node = next((node for node in self.graph.nodes if any(value.name in read for value in node.outputs)), None)
        return f"in {node.origin}" if node is not None else "at an unknown line"

    def _list_input_symbols(self) -> set[str]:
        inputs = {v.name for v in self.graph.inputs}
        return {n for n, s in self.graph.symbols.items() if s.source.name in inputs}

    def _find_shape_env(self) -> Any:
        for node in self.program.graph.nodes:
            fake = node.meta.get("val")
            mode = getattr(fake, "fake_mode", None)
            if mode is not None:
                return mode.shape_env
        return None


def _identify_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key of the elements of a tensor, which two tensors share if they are one."""
    return storage_id(tensor), tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
