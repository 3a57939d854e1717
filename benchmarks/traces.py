"""Build traced graphs of any size as ``torch.export`` does for deep models, but in seconds instead of hours."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from clika_ref.capture.callables import TracedCallable, make_callable
from clika_ref.capture.dimensions import InputComparison
from clika_ref.capture.eager import EagerRun
from clika_ref.capture.traced_calls import TracedCalls

aten = torch.ops.aten

CHANNELS, IMAGE_SIZE = 4, 4

CALLS_PER_BLOCK = 22


class _TracedWeights(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``: only the signature and the parameters of this module are used."""
        return x


class TraceWriter:
    """Adds calls to an FX graph and runs each on fake tensors for its ``meta``. The batch size is symbolic."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.module = _TracedWeights()
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.specs: list[InputSpec] = []
        self.block = 0

    def add_input(self, name: str, *shape: int) -> fx.Node:
        """Add an input with a dynamic first dim."""
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (len(shape) - 1)])
        fake = self.mode.from_tensor(torch.empty(shape), symbolic_context=context)
        return self._add_placeholder(name, fake, InputKind.USER_INPUT, None)

    def add_parameter(self, name: str, *shape: int) -> fx.Node:
        """Add a parameter."""
        data = torch.nn.Parameter(torch.full(shape, 1.0 / (len(name) + self.block % 7)))
        self.module.register_parameter(name, data)
        return self._add_placeholder(name, self.mode.from_tensor(data), InputKind.PARAMETER, name)

    def add_buffer(self, name: str, *shape: int) -> fx.Node:
        """Add a buffer."""
        data = torch.ones(shape)
        self.module.register_buffer(name, data)
        return self._add_placeholder(name, self.mode.from_tensor(data), InputKind.BUFFER, name)

    def _add_placeholder(self, name: str, fake: torch.Tensor, kind: InputKind, target: str | None) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = fake
        self.specs.append(InputSpec(kind, TensorArgument(name), target, persistent=True))
        return node

    def add_call(self, op: Callable[..., Any], *args: Any) -> fx.Node:
        """Add a call of an operator."""
        node = self.graph.call_function(op, args)
        with self.mode, torch.no_grad():
            node.meta["val"] = op(*fx.map_arg(args, lambda n: n.meta["val"]))
        node.meta["nn_module_stack"] = {"": ("", "Model"), "b": (f"blocks.{self.block}", "Block")}
        node.meta["stack_trace"] = f'File "model.py", line {self.block % 500}, in forward'
        return node


def trace_graph(nodes: int) -> tuple[Any, TracedCalls]:
    """Return a program of about ``nodes`` calls, and the calls of the model for its trace."""
    trace = TraceWriter()
    weights = [_add_weights(trace, block) for block in range(nodes // CALLS_PER_BLOCK)]
    steps = trace.add_buffer("steps", 1)
    x = trace.add_input("x", 2, CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
    shared = trace.add_call(aten.add.Tensor, x, 1.0)
    for trace.block, block_weights in enumerate(weights):
        x = _add_block(trace, x, shared, steps, block_weights)
    trace.graph.output((x,))
    return _make_program(trace), _make_traced_calls(trace.module)


def _add_weights(trace: TraceWriter, block: int) -> dict[str, fx.Node]:
    trace.block = block
    shapes = {
        "kernel": (CHANNELS, CHANNELS, 1, 1),
        "scale": (CHANNELS,),
        "shift": (CHANNELS,),
        "matrix": (CHANNELS, CHANNELS),
    }
    parameters = {name: trace.add_parameter(f"blocks_{block}_{name}", *shape) for name, shape in shapes.items()}
    return parameters | {name: trace.add_buffer(f"blocks_{block}_{name}", CHANNELS) for name in ("mean", "variance")}


def _add_block(trace: TraceWriter, x: fx.Node, shared: fx.Node, steps: fx.Node, w: dict[str, fx.Node]) -> fx.Node:
    """Add a convolution, batch norm, a linear layer, in-place calls, views, and calls that CLEAN passes remove."""
    call = trace.add_call
    batch = x.meta["val"].shape[0]
    y = call(aten.conv2d.default, x, w["kernel"], None)
    statistics = (w["scale"], w["shift"], w["mean"], w["variance"], False, 0.1, 1e-5, True)
    y = call(aten.batch_norm.default, y, *statistics)
    y = call(aten.add_.Tensor, y, shared)  # an activation that every block reads
    y = call(aten.relu_.default, y)
    y = call(aten.dropout.default, y, 0.1, False)
    size = call(aten.sym_size.int, x, 0)
    assert size.meta["val"] == batch
    y = call(aten.permute.default, y, [0, 2, 3, 1])
    y = call(aten.reshape.default, y, [size, IMAGE_SIZE * IMAGE_SIZE, CHANNELS])
    y = call(aten.linear.default, y, w["matrix"])
    y = call(aten.gelu.default, y)
    half = call(aten.slice.Tensor, y, 1, 0, IMAGE_SIZE * IMAGE_SIZE // 2)
    call(aten.mul_.Tensor, half, 0.5)  # a write through a view: the base changes
    mask = call(aten.arange.default, CHANNELS)  # the same constants in every block
    mask = call(aten.lt.Scalar, mask, 3)
    y = call(aten.masked_fill.Scalar, y, mask, 0.25)
    y = call(aten.reshape.default, y, [size, IMAGE_SIZE, IMAGE_SIZE, CHANNELS])
    y = call(aten.permute.default, y, [0, 3, 1, 2])
    y = call(aten.contiguous.default, y)
    y = call(aten.mul.Tensor, y, 1.0)
    call(aten.add_.Tensor, steps, 1.0)  # a buffer that every block overwrites
    return call(aten.add.Tensor, y, call(aten.mul.Tensor, x, 0.5))


def _make_program(trace: TraceWriter) -> Any:
    """Return the parts of an ``ExportedProgram`` that the importer reads; PyTorch's class checks in quadratic time."""
    return SimpleNamespace(
        graph=trace.graph,
        graph_module=fx.GraphModule(torch.nn.Module(), trace.graph),
        graph_signature=SimpleNamespace(input_specs=trace.specs),
        constants={},
        state_dict={},
    )


def _make_traced_calls(module: torch.nn.Module) -> TracedCalls:
    callee: TracedCallable = make_callable(module)
    x = torch.randn(2, CHANNELS, IMAGE_SIZE, IMAGE_SIZE)
    _, spec = pytree.tree_flatten(x)
    _, returned = pytree.tree_flatten((x,))
    assert tuple(inspect.signature(module.forward).parameters) == ("x",)
    return TracedCalls(callee, InputComparison(["x"], [[x]]), ("x",), (spec,), [EagerRun([x], returned)])
