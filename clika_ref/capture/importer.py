"""Import a traced program into a graph: calls become nodes, sizes become types, in-place writes become values."""

from __future__ import annotations

import contextlib
import operator as python_operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import fx

from clika_ref.capture.aliasing import AliasTracker, TracedTensor
from clika_ref.capture.aten_schemas import (
    METADATA_MUTATIONS,
    RESIZING_CALLS,
    SKIPPED_CALLS,
    find_functional_overload,
    find_resized_view,
    find_squeezed_dims,
    find_written_arguments,
    has_failed,
    is_contiguous_at_start,
)
from clika_ref.capture.autocast_casts import (
    AutocastRegion,
    active_region,
    autocast_device_type,
    find_cast_dtype,
    has_inner_casts,
)
from clika_ref.capture.complex_entries import ComplexEntry, list_parts, split_complex, view_as_real
from clika_ref.capture.complex_numbers import ComplexCall, has_complex_calls, is_complex, is_complex_call
from clika_ref.capture.decomposition import (
    KERNEL_FORMS,
    STATISTICS_CALLS,
    UNDECLARED_REASON,
    batch_region,
    decompose,
    split_parts,
)
from clika_ref.capture.messages import UnsupportedCall
from clika_ref.capture.origins import origin_of
from clika_ref.capture.size_functions import DYNAMIC_OVERLOADS
from clika_ref.capture.surrounding_autocast import surrounding_autocast
from clika_ref.capture.symbols import SymbolTable
from clika_ref.capture.traced_floats import TracedFloat, find_fill, floats_to_tensors, import_number
from clika_ref.capture.vmap_regions import VmapRegion, split_regions
from clika_ref.core.errors import ClikaError, ModelError, PassError
from clika_ref.core.inference import Builder, infer_types
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator
from clika_ref.core.registry import Registry
from clika_ref.core.types import Origin, TensorType
from clika_ref.torch_internals.operators import HigherOrderOperator, OpOverload, get_schema
from clika_ref.torch_internals.trees import pytree

aten = torch.ops.aten

OperatorFallback = Callable[[OpOverload], Operator | None]
"""Finds an operator for an ATen call that no plugin declares (torchlib), or None."""

NO_OPERATOR_REASON = f"{UNDECLARED_REASON} and PyTorch no decomposition"


STATISTICS_UPDATES = {3: "running_mean_update", 4: "running_var_update"}
"""Operators that update the running statistics, by their positions among operands of batch_norm and instance_norm."""


class Importer:
    """Imports the calls of one traced program into a graph; the caller declares inputs and constants."""

    def __init__(
        self,
        graph: Graph,
        table: SymbolTable,
        registry: Registry,
        fallback: OperatorFallback,
        device: torch.device | None,
    ) -> None:
        self.graph = graph
        self.table = table
        self.registry = registry
        self.fallback = fallback
        self.device = device
        self.origin = Origin()
        self.unsupported: list[UnsupportedCall] = []
        self.detail: Callable[[str], None] = lambda _: None
        self.aliases = AliasTracker(self.builder)
        self._env: dict[fx.Node, Any] = {}
        self._types: dict[tuple[torch.dtype, tuple[Any, ...]], TensorType] = {}
        self._autocast: AutocastRegion | None = active_region(device)
        self.autocast = surrounding_autocast() or None  # see `Signature.autocast`
        self.splits_complex = False
        """Whether complex tensors become pairs of real ones."""
        self._decomposed: list[tuple[OpOverload, bool]] = []
        """The calls whose decompositions are being imported, and whether they are complex."""
        self._no_grad_inputs: list[Any] = []
        """The inputs of the current no_grad region."""

    def for_body(self, body: Graph) -> Self:
        """Return an importer for a body of a node of the graph; it adds its unsupported calls to the list of this one.

        Calls in the body are cast as in the current autocast region.
        """
        inner = type(self)(body, self.table.for_body(body), self.registry, self.fallback, self.device)
        inner.unsupported, inner.autocast, inner._autocast = self.unsupported, self.autocast, self._autocast
        inner.origin, inner.splits_complex = self.origin, self.splits_complex
        return inner

    def builder(self) -> Builder:
        """Return a builder at the end of the graph, with the origin of the current call."""
        return Builder(self.graph, self.registry.operators, None, self.origin)

    def bind(self, node: fx.Node, entry: Any) -> None:
        """Bind a placeholder to an entry."""
        self._env[node] = entry

    def run(self, program: fx.GraphModule) -> Any:
        """Import every call; return the program's outputs as nested entries, or none if a call is unsupported."""
        total, known = len(program.graph.nodes), len(self.unsupported)
        for number, node in enumerate(split_regions(program.graph), 1):
            if isinstance(node, VmapRegion):
                self._import_vmap(node)
                continue
            self.detail(f"{number}/{total}. Parsing node: '{node.name}'")
            if node.op == "output":
                return () if len(self.unsupported) > known else self._entries(node.args[0])
            if node.op == "call_function":
                self._import(node)
            elif node.op == "get_attr":
                self._env[node] = self._attribute(program, node)
        return None

    def value_of(self, entry: Any) -> Any:
        """Return the current value, number or expression of an entry."""
        return self.aliases.current_value(entry) if isinstance(entry, TracedTensor) else entry

    # One call

    def _import(self, node: fx.Node) -> None:
        self.origin = origin_of(node.meta)
        first = len(self.graph)
        try:
            self._env[node] = self._call(node)
        except ClikaError as error:
            self._add_unsupported(node, str(error))
        if len(self.graph) > first:
            last = next(self.graph.nodes_backward())
            scope = "/".join([self.graph.name, *self.origin.scope.split(".")]).rstrip("/")
            self.detail(f"Parsed to -> '{last.name}' (Subgraph: '{scope}')")

    def _call(self, node: fx.Node) -> Any:
        target, fake = DYNAMIC_OVERLOADS.get(node.target, node.target), node.meta.get("val")
        if target in SKIPPED_CALLS or has_failed(node):
            return None
        if target is python_operator.getitem:
            # Traces also unpack unused results, and an operator may omit those.
            return self._entries(node.args[0])[node.args[1]] if node.users else None
        if target is aten.size.default:  # from PyTorch code that specializes on sizes; the trace holds the guards
            return tuple(map(self.table.translate, node.all_input_nodes[0].meta["val"].shape))
        if isinstance(fake, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
            return self._import_number(node, fake)
        if isinstance(target, HigherOrderOperator):
            return self._import_region(node, target)
        if not isinstance(target, OpOverload):
            raise ModelError(f"no operator is declared for {target}")
        if self.splits_complex and is_complex_call(node):
            return self._import_complex(node, target)
        args = self._entries(node.args)
        kwargs = {k: self._entries(v) for k, v in node.kwargs.items()}
        if self.aliases.is_noop(node):
            return self._entries(node.all_input_nodes[0])
        if target in METADATA_MUTATIONS:
            return self._import_metadata_mutation(node, METADATA_MUTATIONS[target], args, kwargs)
        if target in RESIZING_CALLS:
            view, sizes = find_resized_view(node)
            numbers = (tuple(map(self.table.translate, own)) for own in sizes)
            return self._import_metadata_mutation(node, view, (args[0], *numbers), {})
        if target in STATISTICS_CALLS:
            return self._import_decomposition(node, target, None)
        written = find_written_arguments(target, args, kwargs)
        if written:
            return self._write(node, target, args, kwargs, written)
        return self._import_functional(node, target, args, kwargs)

    def _import_functional(
        self, node: fx.Node, target: OpOverload, args: Any, kwargs: Any, *, is_written: bool = False
    ) -> Any:
        if target is aten.as_strided.default and not is_contiguous_at_start(node.args[0]):
            raise ModelError(
                "as_strided of a view that is not contiguous reads memory that is not in the graph. Use indexing "
                "instead."
            )
        if target.overloadpacket is aten.squeeze:
            fake = node.all_input_nodes[0].meta["val"]
            self.table.require_not_one(fake, find_squeezed_dims(fake.dim(), *args[1:]), self.origin.line)
        fill = find_fill(target, args)
        if fill is not None:
            fake = node.meta["val"]
            return self.aliases.root(self._cast_and_expand(fill, self._make_type(fake, fake.dtype)), fake)
        op = self._find_operator(target)
        within = (
            self._autocast if self._autocast is not None and has_inner_casts(target, node, self._autocast) else None
        )
        if op is None or within is not None:
            return self._import_decomposition(node, target, within)
        args, kwargs = floats_to_tensors(args, kwargs, self.builder())
        values, named = self._to_values(args), self._to_values(kwargs)
        if self._autocast is not None:
            values = self._cast_all(find_cast_dtype(target, node, self._autocast), values)
        call = op.convert_call(target, *values, **named)
        if op.name in ("batch_norm", "instance_norm"):
            self._update_statistics(op.name, call.operands, call.attrs, args)
        attrs = {k: self._attribute_value(v) for k, v in call.attrs.items()}
        read = [
            k for k, v in attrs.items() if any(isinstance(leaf, Value | TracedFloat) for leaf in pytree.tree_leaves(v))
        ]
        if read:
            raise ModelError(
                f"{read[0]} is read from a tensor, as by item(), but it must be a constant in the graph. Use the "
                "tensor itself."
            )
        return self._add(node, op, tuple(call.operands), attrs, is_written=is_written)

    def _add(
        self, node: fx.Node, op: Operator, operands: tuple[Any, ...], attrs: dict[str, Any], *, is_written: bool
    ) -> Any:
        found = node.meta["val"]
        many = isinstance(found, tuple | list)
        fakes: Sequence[torch.Tensor] = found if many else (found,)
        if many and not op.returns_tuple:
            fakes = fakes[:1]
        dtypes = _infer_dtypes(op, operands, attrs, fakes) if is_written else [f.dtype for f in fakes]
        types = [self._make_type(f, dtype) for f, dtype in zip(fakes, dtypes, strict=False)]
        made = self.graph.insert(Node(op, operands, attrs, self.origin), types, names=[node.name] * len(types))
        sources = [
            (n.meta.get("val"), self._env[n])
            for n in node.all_input_nodes
            if isinstance(self._env.get(n), TracedTensor)
        ]
        entries: list[TracedTensor] = []
        for value, fake in zip(made.outputs, fakes, strict=True):
            self.table.bind_result(value, fake)
            value.type = self._make_type(fake, value.type.dtype)
            entries.append(self.aliases.result(value, fake, sources, (op, operands[1:], attrs, value.index)))
        return entries if many else entries[0]

    def _import_number(self, node: fx.Node, fake: Any) -> Any:
        args = tuple(map(self.value_of, self._entries(node.args)))
        return import_number(node.target, args, fake, self.table, self.builder())

    # Writes

    def _import_metadata_mutation(self, node: fx.Node, view: OpOverload, args: Any, kwargs: Any) -> Any:
        """Import a call that turns a tensor into a view of its memory in place: the tensor's entry becomes the view."""
        entry = self._import_functional(node, view, args, kwargs)
        if view is not aten.detach.default and any(args[0] is outer for outer in self._no_grad_inputs):
            self._no_grad_inputs.append(entry)  # the same tensor keeps its history
        self._env[node.all_input_nodes[0]] = entry
        return entry

    def _write(self, node: fx.Node, target: OpOverload, args: Any, kwargs: Any, written: list[Any]) -> Any:
        if not all(isinstance(destination, TracedTensor) for destination in written):
            raise ModelError(f"{target} writes to a value that is not a tensor of the graph")
        if target.overloadpacket is aten.copy_:
            made = args[1]
        else:
            pure, args, kwargs = find_functional_overload(target, args, kwargs)
            with self._use_regions(None, self._no_grad_inputs):  # autocast does not cast in-place calls
                made = self._import_functional(node, pure, args, kwargs, is_written=True)
        for destination, entry in zip(written, made if isinstance(made, list) else [made], strict=False):
            self._overwrite(destination, self.value_of(entry))
        return written[0] if len(written) == 1 else written

    def _overwrite(self, destination: TracedTensor, value: Value) -> None:
        """Write a value to a tensor, in its dtype and shape."""
        old = self.value_of(destination)
        new = self._cast_and_expand(value, old.type)
        if _is_differentiable(old.type) and self._is_outside_no_grad(destination):
            new = self.builder()("overwritten", new, old, types=(old.type,))
        self.aliases.write(destination, new)

    def _is_outside_no_grad(self, entry: TracedTensor | None) -> bool:
        """Whether a tensor, or a base of it, existed before the current no_grad region."""
        while entry is not None and not any(entry is outer for outer in self._no_grad_inputs):
            entry = entry.parent
        return entry is not None

    def _cast_and_expand(self, value: Value, type: TensorType) -> Value:
        """Cast and expand a value to the type of the memory that it overwrites."""
        build = self.builder()
        if value.type.dtype != type.dtype:
            value = build("to", value, dtype=type.dtype, types=(TensorType(type.dtype, value.type.shape),))
        if value.type.shape != type.shape:
            value = build("expand", value, size=type.shape, types=(type,))
        return value

    def _update_statistics(self, name: str, operands: Sequence[Any], attrs: Mapping[str, Any], args: Any) -> None:
        """Write the running statistics of batch and instance norm in training, as traces do not show these writes."""
        per_instance = name == "instance_norm"
        is_active = attrs["use_input_stats"] if per_instance else attrs["training"]
        if not is_active or not all(isinstance(operands[position], Value) for position in STATISTICS_UPDATES):
            return
        options = {"momentum": attrs["momentum"], "per_instance": per_instance}
        for position, update in STATISTICS_UPDATES.items():
            old = operands[position]
            new = self.builder()(update, operands[0], old, types=(old.type,), **options)
            self.aliases.write(args[position], self._cast_and_expand(new, old.type))

    # Regions and decompositions

    def _import_region(self, node: fx.Node, target: Any) -> Any:
        args = self._entries(node.args)
        region, unrecorded, detached, known = self._autocast, self._no_grad_inputs, False, len(self.unsupported)
        if target.name() == "wrap_with_set_grad_enabled":
            enabled, inner, *operands = args
            detached = not enabled
            unrecorded = list_parts(operands) if detached else []
        elif target.name() == "wrap_with_autocast":
            kind, dtype, enabled, cache, inner, *operands = args
            if kind == autocast_device_type(self.device):
                self.autocast = self.autocast or ""
                region = (kind, dtype, cache) if enabled else None
        else:
            raise ModelError(
                f"the higher-order operator {target.name()} is not supported; cond, while_loop, scan and map are"
            )
        with self._use_regions(region, unrecorded):
            results = self._inline(inner, operands)
        if len(self.unsupported) > known:
            raise ModelError("calls inside it could not be imported")
        if not detached:
            return results
        outer = set(map(id, unrecorded))  # these keep their history, even if they are written to
        return tuple(r if id(list_parts([r])[0]) in outer else self._detach(r) for r in results)

    @contextlib.contextmanager
    def _use_regions(self, region: AutocastRegion | None, unrecorded: list[Any]) -> Iterator[None]:
        """Import under the given autocast region and inputs of a no_grad region."""
        before = self._autocast, self._no_grad_inputs
        self._autocast, self._no_grad_inputs = region, unrecorded
        try:
            yield
        finally:
            self._autocast, self._no_grad_inputs = before

    def _detach(self, entry: Any) -> Any:
        """Stop gradients at the end of a no_grad region."""
        if isinstance(entry, ComplexEntry):
            return ComplexEntry(self._detach(entry.real), self._detach(entry.imag))
        if not isinstance(entry, TracedTensor) or not _is_differentiable(entry.value.type):
            return entry
        value = self.value_of(entry)
        stopped = self.builder()("detach", value, types=(value.type,))
        if entry.memory is None:
            return TracedTensor(stopped)
        view = (self.registry.operators["detach"], (), {}, 0)
        return TracedTensor(stopped, entry.memory, entry.version, entry, view, (value.type,))

    def _inline(self, program: fx.GraphModule, operands: Sequence[Any]) -> Any:
        """Import a nested program without logging its nodes."""
        for placeholder, entry in zip(program.graph.find_nodes(op="placeholder"), operands, strict=True):
            self._env[placeholder] = entry
        detail, self.detail = self.detail, lambda _: None
        try:
            return self.run(program)
        finally:
            self.detail = detail

    def _import_vmap(self, region: VmapRegion) -> None:
        """Import a region of `torch.vmap`; what it computes for each row becomes calls on whole batches."""
        node = region.results[-1] if region.results else region.nodes[0]
        self.origin = origin_of(node.meta)
        try:
            program = batch_region(region)
            results = self._inline_calls(node, program, [self._env[n] for n in region.operands])
            operands = [n.meta["val"] for n in region.operands]
            fakes = tuple(n.meta["val"] for n in region.results)
            self._env.update(zip(region.results, self._adopt_results(tuple(results), fakes, operands), strict=True))
        except ClikaError as error:
            self._add_unsupported(node, str(error))

    def _import_decomposition(self, node: fx.Node, target: OpOverload, region: AutocastRegion | None) -> Any:
        """Import a call as its decomposition; with a region, including the casts of its inner calls."""
        call = target, is_complex_call(node)
        found = None if call in self._decomposed else decompose(node, target, region)
        if found is None:
            raise ModelError(NO_OPERATOR_REASON)
        program, operands = found
        entries = list(map(self._entries, operands))
        with self._split_inside(program, node), self._mark_decomposed(call):
            is_cast = region is not None or target in KERNEL_FORMS
            results = self._inline_calls(node, program, entries, is_cast=is_cast)
        return self._adopt_results(results, node.meta["val"], [n.meta["val"] for n in operands])

    @contextlib.contextmanager
    def _mark_decomposed(self, call: tuple[OpOverload, bool]) -> Iterator[None]:
        """Let no decomposition inside that of a call contain the call again, which would not end."""
        self._decomposed.append(call)
        try:
            yield
        finally:
            self._decomposed.pop()

    @contextlib.contextmanager
    def _split_inside(self, program: fx.GraphModule, node: fx.Node) -> Iterator[None]:
        """Split the complex numbers of a decomposition, such as that of irfft, if the call itself has none."""
        before = self.splits_complex
        self.splits_complex |= has_complex_calls(program) and not is_complex_call(node)
        try:
            yield
        finally:
            self.splits_complex = before

    def _import_complex(self, node: fx.Node, target: OpOverload) -> Any:
        """Import a call on complex tensors as calls on their parts."""
        written = find_written_arguments(target, node.args, node.kwargs)
        if target in METADATA_MUTATIONS:
            entry = self._import_parts(node, ComplexCall(METADATA_MUTATIONS[target], node.args, node.kwargs))
            self._env[node.all_input_nodes[0]] = entry
            return entry
        if written:
            return self._write_complex(node, target, written)
        call = ComplexCall(target, node.args, node.kwargs)
        return self._import_decomposition(node, target, None) if call.rule is None else self._import_parts(node, call)

    def _import_parts(self, node: fx.Node, call: ComplexCall) -> Any:
        """Import a call that does not write; the results have the memory that the trace shows."""
        parts, operands = self._inline_parts(node, call)
        fakes, known, remaining = node.meta["val"], [n.meta["val"] for n in operands], iter(parts)

        def take(fake: torch.Tensor) -> Any:
            if fake.is_complex():
                return ComplexEntry(*self.aliases.adopt_parts([next(remaining), next(remaining)], fake, known))
            return self.aliases.adopt_result(next(remaining), fake, known)

        return tuple(map(take, fakes)) if isinstance(fakes, tuple | list) else take(fakes)

    def _inline_parts(self, node: fx.Node, call: ComplexCall) -> tuple[Sequence[Any], list[fx.Node]]:
        """Import a call on the parts of its operands; return the entries of its results' parts, and the operands."""
        found = split_parts(node, call)
        if found is None:
            raise ModelError(NO_OPERATOR_REASON)
        program, operands = found
        owners = [n for n in operands for _ in range(2 if is_complex(n) else 1)]
        entries = [e for n in operands for e in (self._parts_of(n) if is_complex(n) else [self._entries(n)])]
        self.aliases.track_parts(program, [n.meta["val"] for n in owners])
        return self._inline_calls(node, program, entries), operands

    def _write_complex(self, node: fx.Node, target: OpOverload, written: Sequence[fx.Node]) -> Any:
        """Import an in-place call with complex tensors as writes to the parts."""
        if target.overloadpacket is aten.copy_:
            call = ComplexCall(aten.copy.default, node.args, node.kwargs)
        else:
            call = ComplexCall(*find_functional_overload(target, node.args, dict(node.kwargs)))
        with self._use_regions(None, self._no_grad_inputs):
            remaining = iter(self._inline_parts(node, call)[0])
        for destination in written:
            for part in self._parts_of(destination) if is_complex(destination) else [self._entries(destination)]:
                self._overwrite(part, self.value_of(next(remaining)))
        entries = tuple(map(self._entries, written))
        return entries[0] if len(entries) == 1 else entries

    def _parts_of(self, node: fx.Node) -> tuple[TracedTensor, TracedTensor]:
        """Return the entries of the parts of a complex tensor; a constant is split at its first use."""
        entry = self._entries(node)
        if not isinstance(entry, ComplexEntry):
            entry = self._env[node] = split_complex(self.view_as_real(entry), self.builder())
        return entry.real, entry.imag

    def view_as_real(self, entry: TracedTensor) -> TracedTensor:
        """Return a complex tensor as a real one whose last dim of size 2 holds the parts."""
        op = self._find_operator(aten.view_as_real.default)
        assert op is not None
        return view_as_real(entry, op, self.builder())

    def _find_operator(self, overload: OpOverload) -> Operator | None:
        """Return the operator of an ATen call: a declared one, or a lowering of torchlib."""
        return self.registry.operator_for(overload) or self.fallback(overload)

    def _inline_calls(
        self, node: fx.Node, program: fx.GraphModule, operands: Sequence[Any], *, is_cast: bool = False
    ) -> Any:
        """Import a program in place of a call; with ``is_cast`` it contains the casts of the autocast region."""
        for inner in program.graph.nodes:
            inner.meta.update({k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta})
        known = len(self.unsupported)
        self.aliases.track(program)
        with self._use_regions(None if is_cast else self._autocast, self._no_grad_inputs):
            results = self._inline(program, operands)
        inner = list(map(_describe_inner_call, self.unsupported[known:]))
        if inner:  # report the outer call, which the user wrote
            del self.unsupported[known:]
            raise ModelError(f"{UNDECLARED_REASON}, and its decomposition needs {', '.join(inner)}")
        return results

    def _adopt_results(self, results: Any, fakes: Any, operands: list[Any]) -> Any:
        if isinstance(results, tuple):
            return tuple(self._adopt_results(r, f, operands) for r, f in zip(results, fakes, strict=True))
        if isinstance(results, ComplexEntry):
            return ComplexEntry(*self.aliases.adopt_parts([results.real, results.imag], fakes, operands))
        return self.aliases.adopt_result(results, fakes, operands) if isinstance(results, TracedTensor) else results

    def _cast_all(self, dtype: torch.dtype | None, values: Any) -> Any:
        return values if dtype is None else tuple(self._cast(v, dtype) for v in values)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, tuple):
            return self._cast_all(dtype, value)
        old = value.type.dtype if isinstance(value, Value) else dtype
        if old in (dtype, torch.float64) or not old.is_floating_point:
            return value
        return self.builder()("to", value, dtype=dtype, types=(TensorType(dtype, value.type.shape),))

    # Conversions

    def _entries(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            if arg not in self._env:
                raise ModelError(f"it needs the result of {arg.target}, which could not be imported")
            return self._env[arg]
        if isinstance(arg, tuple | list):
            return tuple(map(self._entries, arg))
        return self.table.translate(arg)

    def _to_values(self, entries: Any) -> Any:
        if isinstance(entries, tuple | list):
            return tuple(map(self._to_values, entries))
        if isinstance(entries, dict):
            return {k: self._to_values(v) for k, v in entries.items()}
        self.table.require_known(entries)
        return self.value_of(entries)

    def _attribute_value(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return None if self.device is None or value == self.device else value
        return tuple(map(self._attribute_value, value)) if isinstance(value, list | tuple) else value

    def _attribute(self, program: fx.GraphModule, node: fx.Node) -> Any:
        found: Any = python_operator.attrgetter(str(node.target))(program)
        if isinstance(found, torch.Tensor):
            constant = self.graph.add_constant(found.detach(), f"constants.{node.name}")
            return self.aliases.root(constant, node.meta.get("val", found))
        return found

    def _make_type(self, fake: torch.Tensor, dtype: torch.dtype) -> TensorType:
        key = (dtype, tuple(self.table.translate(d) for d in fake.shape))
        if key not in self._types:
            self._types[key] = TensorType(*key)
        return self._types[key]

    def _add_unsupported(self, node: fx.Node, reason: str) -> None:
        if "could not be imported" in reason:  # report the first of a chain, and calls unsupported in any case
            reason = self._find_missing_reason(node)
        if reason:
            self.unsupported.append(UnsupportedCall(str(node.target), self.origin, reason))

    def _find_missing_reason(self, node: fx.Node) -> str:
        """Return the reason if nothing serves a call, whatever its operands are; "" if something does."""
        target = node.target
        if not isinstance(target, OpOverload) or target in SKIPPED_CALLS or get_schema(target).is_mutable:
            return ""
        try:
            served = self._find_operator(target) or decompose(node, target)
        except ModelError as error:
            return str(error)
        return "" if served else NO_OPERATOR_REASON


def _describe_inner_call(call: UnsupportedCall) -> str:
    """Return the name of a call in a decomposition, and the reason if it is more than the lack of an operator."""
    reason = call.reason.removeprefix(f"{UNDECLARED_REASON}, and ")
    return call.call if reason == NO_OPERATOR_REASON else f"{call.call} ({reason})"


def _infer_dtypes(
    op: Operator, operands: Sequence[Any], attrs: Mapping[str, Any], fakes: Sequence[torch.Tensor]
) -> list[torch.dtype]:
    """Return the result dtypes of the functional form of a writing call, whose own results have the written dtype."""
    try:
        return [made.dtype for made in infer_types(op, operands, attrs)]
    except PassError:  # validation reports wrong dtypes
        return [f.dtype for f in fakes]


def _is_differentiable(type: TensorType) -> bool:
    return type.dtype.is_floating_point or type.dtype.is_complex
