"""One operator, one pass and one target: all that a plugin can add, in one file to copy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref.core.accuracy import EXACT, ErrorClass, ulp
from clika_ref.core.artifacts import Artifact
from clika_ref.core.execution import interpret
from clika_ref.core.hooks import hookimpl
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph, Node, Value
from clika_ref.core.operators import Operator, operator
from clika_ref.core.passes import Pass, Phase
from clika_ref.core.registry import load_registry
from clika_ref.core.rewriter import Skip, apply_rules, rule
from clika_ref.core.targets import Target
from clika_ref.core.traits import OWN_QPARAMS
from clika_ref.serialization.atomic_files import write_atomically
from clika_ref.serialization.graph_format import graph_from_json, graph_to_json

CLIKA_REF_API = 1

# --- the operator


@torch.library.custom_op("example::squared_relu", mutates_args=())
def call_squared_relu(x: Tensor) -> Tensor:
    """Return ``max(x, 0) ** 2``. Models call this function, and tracing records it as one call."""
    return F.relu(x).square()


torch.library.register_fake("example::squared_relu", torch.empty_like)
torch.library.register_autograd(
    "example::squared_relu",
    lambda saved, gradient: 2 * gradient * F.relu(saved.saved_tensors[0]),
    setup_context=lambda ctx, inputs, **_: ctx.save_for_backward(*inputs),
)


@operator(torch.ops.example.squared_relu.default, quant=OWN_QPARAMS, error=ulp(1))
def squared_relu(x: Tensor) -> Tensor:
    """``max(x, 0) ** 2``, elementwise.

    Source: So et al., Primer: Searching for Efficient Transformers for Language Modeling, section 4.
    """
    return F.relu(x).square()


@squared_relu.onnx
def _(op, x):
    positive = op.Relu(x)
    return op.Mul(positive, positive)


@squared_relu.samples
def _(draw, s):
    return s.call(draw(s.tensor(dtype=(torch.float32, torch.float64, torch.float16), low=-5, high=5)))


# --- the pass


@rule("squared_relu")
def drop_relu(node: Node, build: Builder):
    """``squared_relu(relu(x))`` is ``squared_relu(x)``."""
    match node.inputs[0]:
        case Value(producer=Node("relu", (x,))):
            return build("squared_relu", x)
    return Skip("its operand is not a relu")


@dataclass(frozen=True)
class DropRelu:
    """Remove a ReLU before a squared ReLU, which sets negative elements to 0 itself."""

    name: ClassVar[str] = "drop-relu"
    phase: ClassVar[Phase] = Phase.CLEAN
    after: ClassVar[tuple[str, ...]] = ()
    error: ClassVar[ErrorClass] = EXACT
    removes: ClassVar[str] = "ReLU before squared ReLU"

    def __call__(self, graph: Graph, operators: Mapping[str, Operator], /) -> None:
        """Apply the rule wherever it holds."""
        apply_rules(graph, [drop_relu], operators)


# --- the target


@dataclass(frozen=True)
class Interpreter(Target):
    """Files that clika-ref's own interpreter runs: safetensors, with the graph as JSON in the metadata."""

    name: str = "interpreter"

    def unsupported_reason(self, node: Node) -> str | None:
        """Reject random numbers, which differ in each run of a file."""
        return f"{node.op.name} draws random numbers" if node.is_random else None

    def compile(self, graph: Graph, path: Path, **_: Any) -> Artifact:
        """Write a graph and its weights."""
        weights = {name: v.data.detach().cpu().clone() for name, v in graph.constants.items() if v.data is not None}
        blob = safetensors.torch.save(weights, {"graph": json.dumps(graph_to_json(graph))})
        with write_atomically(path) as file:
            file.write(blob)
        inputs, outputs = (tuple(v.name for v in values) for values in (graph.inputs, graph.outputs))
        return Artifact(path, self.name, inputs, outputs, {"bytes": len(blob)})

    def load(self, artifact: Artifact) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """Return a function that runs a file on one tensor for each input."""
        with safetensors.safe_open(artifact.path, "pt") as file:
            document = json.loads(file.metadata()["graph"])
            weights = {name: file.get_tensor(name) for name in document["constants"]}
        graph = graph_from_json(document, load_registry().operators.get, weights)
        return lambda inputs: interpret(graph, inputs)[0]

    def explain(self, artifact: Artifact) -> Mapping[str, str]:
        """Return ``float`` for every node: each runs in the dtype of its type."""
        with safetensors.safe_open(artifact.path, "pt") as file:
            nodes = json.loads(file.metadata()["graph"])["nodes"]
        return {outputs[0][0]: "float" for _, _, _, outputs, _ in nodes}


# --- the hooks


@hookimpl
def clika_ref_operators() -> Sequence[Operator]:
    """Return the operator."""
    return [squared_relu]


@hookimpl
def clika_ref_passes() -> Sequence[Pass]:
    """Return the pass."""
    return [DropRelu()]


@hookimpl
def clika_ref_targets() -> Sequence[Target]:
    """Return the target."""
    return [Interpreter()]
