"""One call of an operator as a graph, in eager PyTorch and in ONNX Runtime, compared in float64."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from clika_ref.core.errors import PassError
from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import Operator
from clika_ref.core.samples import Call, Descriptions, TensorSample, random_draw, realize
from clika_ref.core.symbols import make_symbol
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.emission import emit


@dataclass
class Case:
    """A drawn call with its tensors filled in."""

    op: Operator
    operands: list[Any]
    attrs: dict[str, Any]

    def __str__(self) -> str:
        shown = [
            f"{str(o.dtype)[6:]}{list(o.shape)}" if isinstance(o, torch.Tensor) else repr(o) for o in self.operands
        ]
        return f"{self.op.name}({', '.join([*shown, *(f'{k}={v!r}' for k, v in self.attrs.items())])})"

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [o for o in self.operands if isinstance(o, torch.Tensor)]

    def eager(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Run the reference; with ``dtype`` given, on floats converted to it."""
        operands = [
            o.to(dtype) if dtype and isinstance(o, torch.Tensor) and o.is_floating_point() else o for o in self.operands
        ]
        attrs = {
            k: dtype if dtype and isinstance(v, torch.dtype) and v.is_floating_point else v
            for k, v in self.attrs.items()
        }
        result = self.op(*operands, **attrs)
        return [result] if isinstance(result, torch.Tensor) else list(result)


def draw_case(op: Operator, seed: int) -> Case:
    assert op.sampler is not None, f"{op.name} declares no samples"
    rng = random.Random(f"{op.name}-{seed}")
    generator = torch.Generator().manual_seed(zlib.crc32(f"{op.name}-{seed}".encode()))
    call = op.sampler(random_draw(rng), Descriptions())
    assert isinstance(call, Call)
    full = op.call(*call.operands, **call.attrs)
    return Case(op, [realize(o, generator) if isinstance(o, TensorSample) else o for o in full.operands], full.attrs)


def infer_case_types(case: Case, operands: list[Any]) -> tuple[TensorType, ...]:
    """Infer the output types; where sizes depend on the data, a lowering must not know any: they become symbols."""
    try:
        return infer_types(case.op, operands, case.attrs)
    except PassError as error:
        if "depends on the data" not in str(error):
            raise
    return tuple(
        TensorType(r.dtype, tuple(make_symbol(f"u{i}_{d}") for d in range(r.ndim))) for i, r in enumerate(case.eager())
    )


def build_case_graph(case: Case) -> Graph:
    graph = Graph(case.op.name)
    inputs: list[Any] = []
    for operand in case.operands:
        if isinstance(operand, torch.Tensor):
            inputs.append(graph.add_input(TensorType(operand.dtype, tuple(operand.shape)), f"x{len(graph.inputs)}"))
        else:
            inputs.append(operand)
    types = infer_case_types(case, inputs)
    node = graph.insert(Node(case.op, inputs, case.attrs), types)
    for value in node.outputs:
        graph.add_output(value)
    return graph


def run_onnx(graph: Graph, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    model = emit(graph)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {i.name for i in session.get_inputs()}
    feed = {v.name: t.numpy() for v, t in zip(graph.inputs, tensors, strict=True) if v.name in wanted}
    return [torch.from_numpy(np.asarray(r)) for r in session.run(None, feed)]


def find_mismatch(case: Case, expected: list[torch.Tensor], actual: list[torch.Tensor]) -> str | None:
    """Return a message about the difference of the target from eager beyond rounding, or None.

    Floats are judged by the error that eager itself makes against float64: at most 20 times as much (correct runtimes
    reach 19.9, the mildest precision cheat starts at 82) plus 4 ulp of the largest element.
    """
    exact = [t.double() if t.is_floating_point() else t for t in case.eager(torch.float64)]
    for index, (e, a, r) in enumerate(zip(expected, actual, exact, strict=True)):
        if e.dtype != a.dtype or e.shape != a.shape:
            return f"output {index}: {a.dtype}{list(a.shape)} instead of {e.dtype}{list(e.shape)}"
        if not e.is_floating_point() or case.op.error.kind == "exact":
            if not torch.equal(torch.nan_to_num(e), torch.nan_to_num(a)) or not torch.equal(e.isnan(), a.isnan()):
                return f"output {index} differs: {a} instead of {e}"
            continue
        finite = e.isfinite()
        if not torch.equal(finite, a.isfinite()) or not torch.equal(e.isnan(), a.isnan()):
            return f"output {index}: other special values: {a} instead of {e}"
        if finite.any():
            scale = float(e[finite].abs().max())
            bound = 20 * float((e.double() - r)[finite].abs().max()) + 4 * scale * torch.finfo(e.dtype).eps
            worst = float((a.double() - r)[finite].abs().max())
            if worst > bound:
                return f"output {index}: off by {worst:.3g}, allowed {bound:.3g} (largest element {scale:.3g})"
    return None


def assert_runtime_equals_eager(op: Operator, *operands: Any, **attrs: Any) -> None:
    """Assert that ONNX Runtime computes a call as eager does, up to rounding."""
    call = op.call(*operands, **attrs)
    case = Case(op, list(call.operands), call.attrs)
    difference = find_mismatch(case, case.eager(), run_onnx(build_case_graph(case), case.tensors))
    assert difference is None, f"{case}: {difference}"
