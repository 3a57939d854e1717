"""The ``op`` argument of ONNX lowerings: ``op.Softmax(x, axis=1)`` adds a node, helpers add common groups of nodes."""

from __future__ import annotations

import contextlib
import functools
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from clika_ref.core.errors import PluginError, TargetError
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.dtypes import TO_TORCH, bytes_of, to_onnx
from clika_ref.onnx_export.int4 import INT4_BITS, pack_int4
from clika_ref.onnx_export.sizes import SizeEmitter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from clika_ref.core.types import Dim

OPSET = 18
"""The ONNX opset of lowerings: the one that torchlib uses and every target accepts."""

BFLOAT16_OPSET = 22
"""The first opset with bfloat16 convolutions, pooling and many activations."""

BOOLEAN_RESULTS = frozenset(
    {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not", "Xor", "IsNaN", "IsInf"}
)
INT64_RESULTS = frozenset({"Shape", "Size", "NonZero", "ArgMax", "ArgMin"})
TYPED_BY_SECOND_OPERAND = frozenset({"Where", "CastLike", "OneHot"})


class NewerOpsetError(Exception):
    """A lowering needs a newer opset than the current one: the model is lowered again with that opset."""

    def __init__(self, opset: int) -> None:
        super().__init__(opset)
        self.opset = opset


class OnnxBuilder:
    """Adds ONNX nodes; every attribute that is not a method below is an ONNX operator of the default domain.

    Operands are ONNX values (None if absent); attributes are keywords. A call returns one value, or a tuple with
    ``outputs=n``. ``result`` is the type of the output of the node that is being lowered (``results``: of all outputs).
    ``opset`` is the version of the default domain.

    Raises:
        ModelError: by any method: ONNX has no such dtype.
    """

    def __init__(self, opset: int = OPSET) -> None:
        self.opset = opset
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self.results: tuple[TensorType, ...] = ()
        self.prefix = ""
        self.metadata: dict[str, str] = {}
        self.sizes = SizeEmitter(self)
        self.domains: set[str] = {""}
        self._types: dict[ir.Value, TensorType | torch.dtype] = {}
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._counts: dict[str, int] = {}
        self._format_size = functools.cache(str)  # sympy takes milliseconds to print the sizes after strided layers

    # Nodes

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(
                f"`op` has no method {op_type!r}. Call an ONNX operator, whose name starts with a capital letter."
            )

        def add(*operands: ir.Value | None, outputs: int = 1, **attributes: Any) -> Any:
            return self.node(op_type, *operands, outputs=outputs, **attributes)

        self.__dict__[op_type] = add
        return add

    def node(self, op_type: str, *operands: ir.Value | None, outputs: int = 1, domain: str = "", **attrs: Any) -> Any:
        """Add a node ``op_type`` of any domain, and return its outputs; omit ``attrs`` that are None.

        Raises:
            PluginError: an operand is not an ONNX value.
            TargetError: an attribute is a size that is known only at run time.
        """
        for operand in operands:
            if not isinstance(operand, ir.Value | None):
                kind = type(operand).__name__
                raise PluginError(f"op.{op_type}: operand {operand!r} is a {kind}. Use op.like(x, number) for numbers.")
        while operands and operands[-1] is None:  # an absent bias of LayerNormalization crashes ORT
            operands = operands[:-1]
        _reject_symbolic_attributes(op_type, attrs)
        self._require_bfloat16(op_type, operands, domain)
        attributes = [
            ir.convenience.convert_attribute(k, _to_onnx_attribute(v)) for k, v in attrs.items() if v is not None
        ]
        node = ir.Node(domain, op_type, operands, attributes, num_outputs=outputs)
        self._append(node)
        self._types.update(dict.fromkeys(node.outputs, self._infer_dtype(op_type, operands, attrs)))
        return node.outputs[0] if outputs == 1 else tuple(node.outputs)

    @contextlib.contextmanager
    def subgraph(self, *, is_closed: bool = False) -> Iterator[SubgraphBuilder]:
        """Add the nodes of the context to a subgraph of the next node, such as a branch of ``If``.

        Its nodes may read all values outside; what it computes is known inside only. If it ``is_closed``, sizes are
        read from its own inputs.
        """
        nodes, self.nodes = self.nodes, []
        with self.sizes.inner_scope(is_closed=is_closed):
            try:
                yield SubgraphBuilder(self)
            finally:
                self.nodes = nodes

    def adopt(self, nodes: Sequence[ir.Node]) -> None:
        """Add nodes that another recorder created."""
        for node in nodes:
            self._require_bfloat16(node.op_type, node.inputs, node.domain)
            self._append(node)
            for value in node.outputs:
                self._types.setdefault(value, self.results[0].dtype)

    def _append(self, node: ir.Node) -> None:
        node.name = self.new_name(node.op_type)
        node.metadata_props.update(self.metadata)
        self.domains.add(node.domain)
        self.nodes.append(node)
        for value in node.outputs:
            value.name = self.new_name(f"{node.op_type}_out")

    def new_name(self, hint: str) -> str:
        """Return a unique name for a node or value of the current lowering."""
        base = f"{self.prefix}/{hint}"
        count = self._counts.get(base, 0)
        self._counts[base] = count + 1
        return f"{base}_{count}" if count else base

    def _infer_dtype(self, op_type: str, operands: Sequence[Any], attrs: Mapping[str, Any]) -> torch.dtype:
        if op_type in BOOLEAN_RESULTS:
            return torch.bool
        if op_type in INT64_RESULTS:
            return torch.int64
        if op_type == "Cast":
            return TO_TORCH[ir.DataType(attrs["to"])]
        operands = operands[1:] if op_type in TYPED_BY_SECOND_OPERAND else operands
        first = next((o for o in operands if o is not None), None)
        return self.results[0].dtype if first is None else self.dtype(first)

    def require_opset(self, opset: int) -> None:
        """Restart with a newer opset, unless the model already uses it.

        Raises:
            NewerOpsetError: the opset is older; `emit` catches this.
        """
        if self.opset < opset:
            raise NewerOpsetError(opset)

    def _require_bfloat16(self, op_type: str, operands: Sequence[ir.Value | None], domain: str) -> None:
        """Restart with the bfloat16 opset if only that version of the operator takes a bfloat16 operand."""
        for position, operand in enumerate(operands):
            known = None if operand is None or domain else self._types.get(operand)
            is_bfloat16 = torch.bfloat16 in (known, getattr(known, "dtype", None))
            if is_bfloat16 and not _takes_bfloat16(op_type, position, self.opset):
                self.require_opset(BFLOAT16_OPSET if _takes_bfloat16(op_type, position, BFLOAT16_OPSET) else self.opset)

    # Types of values

    def annotate(self, value: ir.Value, type: TensorType) -> None:
        """Declare the type of a value, and write it into the model."""
        value.type = ir.TensorType(to_onnx(type.dtype))
        value.shape = ir.Shape([d if isinstance(d, int) else self._format_size(d) for d in type.shape])
        self.declare(value, type)

    def declare(self, value: ir.Value, type: TensorType | torch.dtype) -> ir.Value:
        """Record the type of a value (for an intermediate: at least its dtype)."""
        self._types[value] = type
        return value

    def dtype(self, value: ir.Value) -> torch.dtype:
        """Return the dtype of a value."""
        known = self._types[value]
        return known.dtype if isinstance(known, TensorType) else known

    def shape(self, value: ir.Value) -> tuple[Dim, ...]:
        """Return the shape of an operand of the lowering.

        Raises:
            PluginError: the value is an intermediate, and only its dtype is known.
        """
        known = self._types[value]
        if not isinstance(known, TensorType):
            raise PluginError(f"the shape of the intermediate {value.name!r} is unknown. Derive it from the operands.")
        return known.shape

    def rank(self, value: ir.Value) -> int:
        """Return the number of dims of an operand.

        Raises:
            PluginError: as `shape`.
        """
        return len(self.shape(value))

    @property
    def result(self) -> TensorType:
        """The type of the first output of the node that is being lowered."""
        return self.results[0]

    # Constants

    def constant(
        self, data: torch.Tensor | np.ndarray[Any, Any] | Sequence[Any] | float, dtype: torch.dtype
    ) -> ir.Value:
        """Return a constant with the shape of ``data``, as ``dtype``; equal constants are stored once."""
        # By NumPy, since torch would convert Python floats to float32.
        exact = data if isinstance(data, torch.Tensor) else np.asarray(data)
        tensor = torch.as_tensor(exact).detach().to(dtype).contiguous()
        key = dtype, tuple(tensor.shape), bytes_of(tensor).tobytes()
        if key not in self._constants:
            name = f"/constant_{len(self._constants)}"  # names in a model have no slash
            value = ir.Value(name=name, shape=ir.Shape(tensor.shape), type=ir.TensorType(to_onnx(dtype)))
            value.const_value = tensor_adapters.TorchTensor(tensor, name=name)
            self._constants[key] = self.initializers[name] = value
            self._types[value] = TensorType(dtype, tuple(tensor.shape))
        return self._constants[key]

    def scalar(self, number: Any, dtype: torch.dtype) -> ir.Value:
        """Return ``number`` as a 0-d value of ``dtype``: a constant, or a size expression computed at run time."""
        if is_symbolic(number):
            return self.cast(self.sizes.scalar(number), dtype)
        return self.constant(number, dtype)

    def is_constant(self, x: ir.Value) -> bool:
        """Return whether a value is a constant of the model."""
        return x.const_value is not None

    def as_int4(self, x: ir.Value) -> ir.Value:
        """Return an int8 constant, also a transposed one, stored as INT4; return a computed value unchanged."""
        stored, shape, mover = x.const_value, x.shape, x.producer()
        if mover is not None and mover.op_type == "Transpose" and not x.uses():
            constant = mover.inputs[0]
            if constant is not None and constant.const_value is not None:
                mover.replace_input_with(0, self.as_int4(constant))
                x.type = ir.TensorType(ir.DataType.INT4)
        if stored is None or shape is None:
            return x
        name, kind = f"{x.name}/int4", ir.DataType.INT4
        if name not in self.initializers:
            value = ir.Value(name=name, shape=shape, type=ir.TensorType(kind))
            value.const_value = ir.LazyTensor(lambda: _pack(stored, name), dtype=kind, shape=shape, name=name)
            self.initializers[name] = value
            self._types[value] = self._types[x]
        return self.initializers[name]

    def as_bytes_of_halves(self, x: ir.Value, offset: int) -> ir.Value:
        """Return a 4-bit constant ``x[n, d]``, int8, as ``uint8[n, ceil(d / 2)]``, plus ``offset`` in each half."""
        stored = x.const_value
        assert stored is not None
        rows, width = (int(size) for size in stored.shape.numpy())
        name, kind, shape = f"{x.name}/bytes", ir.DataType.UINT8, ir.Shape((rows, -(-width // 2)))
        if name not in self.initializers:
            value = ir.Value(name=name, shape=shape, type=ir.TensorType(kind))
            make = partial(_join_halves, stored, offset, name)
            value.const_value = ir.LazyTensor(make, dtype=kind, shape=shape, name=name)
            self.initializers[name] = value
            self._types[value] = TensorType(torch.uint8, (rows, -(-width // 2)))
        return self.initializers[name]

    def like(self, x: ir.Value, number: Any) -> ir.Value:
        """Return a number as a 0-d value with the dtype of ``x``; return a value unchanged."""
        return self.like_scalar(number, self.dtype(x))

    def like_scalar(self, x: Any, dtype: torch.dtype) -> ir.Value:
        """Return ``x``, a number, as a 0-d value of ``dtype``; return a value unchanged."""
        return x if isinstance(x, ir.Value) else self.scalar(x, dtype)

    def ints(self, numbers: Sequence[Any]) -> ir.Value:
        """Return int64[n] with the given elements; they may be size expressions."""
        if is_symbolic(tuple(numbers)):
            return self.sizes.vector(tuple(numbers))
        return self.constant(list(numbers), torch.int64)

    # Common groups

    def cast(self, x: ir.Value, dtype: torch.dtype) -> ir.Value:
        """Return ``x`` as ``dtype``; add no node if it already has that dtype."""
        return x if self.dtype(x) == dtype else self.Cast(x, to=int(to_onnx(dtype)))

    def promote(self, *operands: Any, to: torch.dtype | None = None) -> tuple[ir.Value, ...]:
        """Return all operands, including numbers, as values of one dtype, ``to`` (by default the result's)."""
        dtype = to or self.result.dtype
        return tuple(self.cast(o, dtype) if isinstance(o, ir.Value) else self.scalar(o, dtype) for o in operands)

    def reshape(self, x: ir.Value, shape: Sequence[Any]) -> ir.Value:
        """Return ``x`` in another shape; its sizes may be expressions.

        Expressions equal to the input size at the same dim become 0, a single other expression becomes -1: neither
        needs arithmetic at run time. (Both together would fail on an empty tensor, as ONNX cannot infer the missing
        size.)
        """
        known_type = self._types[x]
        own = known_type.shape if isinstance(known_type, TensorType) else ()
        sizes = [0 if is_symbolic(size) and i < len(own) and size == own[i] else size for i, size in enumerate(shape)]
        if 0 not in shape and not is_symbolic(tuple(sizes)):
            return self.Reshape(x, self.ints(sizes))
        dims = list(shape)
        symbolic = [i for i, size in enumerate(dims) if is_symbolic(size)]
        known = all(isinstance(s, int) and s > 0 for s in dims if not is_symbolic(s))
        if len(symbolic) == 1 and known:
            dims[symbolic[0]] = -1
        zero = 0 in dims
        return self.Reshape(x, self.ints(dims), allowzero=1 if zero or len(symbolic) > 1 else None)


class SubgraphBuilder:
    """A subgraph under construction; see `OnnxBuilder.subgraph`."""

    def __init__(self, op: OnnxBuilder) -> None:
        self.op = op
        self.name = op.new_name("subgraph")
        self.inputs: list[ir.Value] = []

    def add_input(self, dtype: torch.dtype, shape: Sequence[Dim]) -> ir.Value:
        """Append an input of the subgraph."""
        value = ir.Value(name=self.op.new_name("subgraph_in"))
        self.op.annotate(value, TensorType(dtype, tuple(shape)))
        self.inputs.append(value)
        return value

    def finish(self, outputs: Sequence[ir.Value], types: Sequence[TensorType]) -> ir.Graph:
        """Return the subgraph with outputs of these types: the attribute of the node that runs it.

        A value from outside, or returned twice, is copied: each output is the result of a node of the subgraph.
        """
        made = {value for node in self.op.nodes for value in node.outputs}
        results: list[ir.Value] = []
        for value, kind in zip(outputs, types, strict=True):
            own = value if value in made else self.op.Identity(value)
            made.discard(own)
            self.op.annotate(own, kind)
            results.append(own)
        return ir.Graph(self.inputs, results, nodes=self.op.nodes, name=self.name)


@functools.cache
def _takes_bfloat16(op_type: str, position: int, opset: int) -> bool:
    """Whether an ONNX operator of an opset takes bfloat16 at a position."""
    if not onnx.defs.has(op_type, opset, ""):
        return False
    formal = onnx.defs.get_schema(op_type, opset, "").inputs
    return "tensor(bfloat16)" in formal[min(position, len(formal) - 1)].types  # the last one may be variadic


def _pack(tensor: ir.TensorProtocol, name: str) -> ir.PackedTensor[Any]:
    steps = torch.from_numpy(np.array(tensor.numpy()))
    return ir.PackedTensor(pack_int4(steps), ir.DataType.INT4, shape=ir.Shape(steps.shape), name=name)


def _join_halves(stored: ir.TensorProtocol, offset: int, name: str) -> tensor_adapters.TorchTensor:
    """Return the rows of a matrix with two neighbors in each byte; the last one of an odd row stands alone."""
    steps = torch.from_numpy(np.array(stored.numpy())).to(torch.int16) + offset
    steps = torch.nn.functional.pad(steps, (0, steps.shape[1] % 2)).to(torch.uint8)
    return tensor_adapters.TorchTensor(steps[:, 0::2] | (steps[:, 1::2] << INT4_BITS), name=name)


def _reject_symbolic_attributes(op_type: str, attrs: Mapping[str, Any]) -> None:
    for name, value in attrs.items():
        if is_symbolic(tuple(value) if isinstance(value, list) else value):
            raise TargetError(
                f"ONNX's {op_type} needs a constant for {name}, but {value} is known only at run time. Make that dim "
                "static."
            )


def _to_onnx_attribute(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, bool):
        return int(value)
    return int(to_onnx(value)) if isinstance(value, torch.dtype) else value
