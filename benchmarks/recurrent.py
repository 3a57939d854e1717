"""GRU with the input products of all steps in one INT8 matmul, relative to float: is it faster in ONNX Runtime?

``GRU`` has no INT8 form there. With products from outside, its own product of inputs is one with the identity, or a
``Scan`` computes the steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from benchmarks.measuring import run_in_turn
from clika_ref.reporting.tables import print_table

STEPS, ROUNDS = 100, 15

SIZES = [(states, states * factor) for states in (64, 128, 256, 512) for factor in (1, 4)]
"""Numbers of states and of inputs."""

Array = NDArray[Any]


class GruFiles:
    """A GRU with random weights, as a node and in the forms with hoisted products."""

    def __init__(self, states: int, inputs: int) -> None:
        draw = np.random.default_rng(0)
        bound = states**-0.5
        self.states, self.inputs = states, inputs
        self.weight, self.hidden = (
            draw.uniform(-bound, bound, (3 * states, n)).astype(np.float32) for n in (inputs, states)
        )
        self.bias, self.hidden_bias = draw.uniform(-bound, bound, (2, 3 * states)).astype(np.float32)

    def make_float(self) -> onnx.ModelProto:
        """Return the node that exports write."""
        return self._make_model([self._node("x")], self._node_weights(self.weight, self.bias))

    def make_with_identity(self) -> onnx.ModelProto:
        """Return the node with finished products as its input, and the identity as its weight."""
        identity = self._node_weights(np.eye(3 * self.states, dtype=np.float32), np.zeros_like(self.bias))
        return self._make_model([self._product(), self._node("gates")], {**self._product_weights(), **identity})

    def make_with_scan(self) -> onnx.ModelProto:
        """Return the steps as a ``Scan`` over finished products."""
        body = onnx.parser.parse_graph(f"""
            step (float[1, {self.states}] h, float[1, {3 * self.states}] g)
                => (float[1, {self.states}] next, float[1, {self.states}] y) {{
                product = MatMul(h, hidden)
                own = Add(product, hidden_bias)
                hz, hr, hn = Split<axis=1, num_outputs=3>(own)
                gz, gr, gn = Split<axis=1, num_outputs=3>(g)
                z0 = Add(gz, hz)
                z = Sigmoid(z0)
                r0 = Add(gr, hr)
                r = Sigmoid(r0)
                reset = Mul(r, hn)
                n0 = Add(gn, reset)
                n = Tanh(n0)
                change = Sub(h, n)
                kept = Mul(z, change)
                next = Add(n, kept)
                y = Identity(next)
            }}""")
        scan = helper.make_node("Scan", ["start", "gates"], ["last", "y"], num_scan_inputs=1, body=body)
        start = np.zeros((1, self.states), np.float32)
        weights = {"hidden": self.hidden.T, "hidden_bias": self.hidden_bias, "start": start}
        return self._make_model([self._product(), scan], {**self._product_weights(), **weights})

    def _product(self) -> onnx.NodeProto:
        operands = ["x", "integers", "scales", "", "bias"]
        return helper.make_node("DynamicQuantizeMatMul", operands, ["gates"], domain="com.microsoft")

    def _product_weights(self) -> dict[str, Array]:
        scales = np.abs(self.weight).max(1) / 127
        return {
            "integers": np.rint(self.weight / scales[:, None]).astype(np.int8).T,
            "scales": scales,
            "bias": self.bias,
        }

    def _node(self, source: str) -> onnx.NodeProto:
        return helper.make_node("GRU", [source, "W", "R", "B"], ["y"], hidden_size=self.states, linear_before_reset=1)

    def _node_weights(self, weight: Array, bias: Array) -> dict[str, Array]:
        return {"W": weight[None], "R": self.hidden[None], "B": np.concatenate([bias, self.hidden_bias])[None]}

    def _make_model(self, nodes: Sequence[onnx.NodeProto], weights: dict[str, Array]) -> onnx.ModelProto:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [STEPS, 1, self.inputs])
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        stored = [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in weights.items()]
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(helper.make_graph(nodes, "gru", [x], [y], stored), opset_imports=opsets, ir_version=10)


def _make_call(model: onnx.ModelProto, x: Array) -> Callable[[], float]:
    """Return a function that runs a model on one thread and returns the seconds."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def call() -> float:
        start = time.perf_counter()
        session.run(["y"], {"x": x})
        return time.perf_counter() - start

    return call


def run() -> None:
    """Print the time of both forms relative to float, by the numbers of states and of inputs."""
    rows: list[tuple[str, ...]] = []
    for states, inputs in SIZES:
        files = GruFiles(states, inputs)
        forms = {"float": files.make_float(), "identity": files.make_with_identity(), "scan": files.make_with_scan()}
        x = np.random.default_rng(1).standard_normal((STEPS, 1, inputs)).astype(np.float32)
        found = run_in_turn({name: _make_call(model, x) for name, model in forms.items()}, ROUNDS)
        seconds = {name: statistics.median(times) for name, times in found.items()}
        ratios = (f"{seconds[name] / seconds['float']:.2f}" for name in ("identity", "scan"))
        rows.append((f"{states}", f"{inputs}", f"{seconds['float'] * 1e3:.2f} ms", *ratios))
    columns = ("states", "inputs", "float", "GRU of products / float", "Scan of products / float")
    print_table(
        columns, rows, title=f"GRU with hoisted INT8 products, {STEPS} steps, batch 1, one thread of ONNX Runtime"
    )
