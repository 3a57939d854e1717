"""What integers do to the products of attention, each of two computed values, which no target plans: latency and SQNR.

They are put into the file that a quantized module is exported to: bytes from 0 to 1 for what a softmax returns, signed
ones around 0 for what stands second, as OpenVINO and ONNX Runtime multiply them, and what each takes for queries.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.measuring import in_fresh_process, in_turn, processor_seconds, ratio
from benchmarks.ptq.judging import judged, outputs
from benchmarks.ptq.quantizers import compiled
from benchmarks.ptq.runtimes import RUNTIMES
from benchmarks.ptq.subjects import SUBJECTS, Batch, Prepared

# isort: split
import torch

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, DeploymentSettings_OpenVINO_ONNX
from clika_ref.reporting.tables import print_table

SCORES, MIXTURES = "scores", "mixtures"
"""Products of queries with keys, and of what a softmax makes of them with values."""
VARIANTS: Mapping[str, Collection[str]] = {
    "as planned": (), SCORES: (SCORES,), MIXTURES: (MIXTURES,), "both": (SCORES, MIXTURES),
}  # fmt: skip
COLUMNS = ("model", "runtime", "products in integers", "ms", "of as planned", "SQNR", "mean cosine")
DEPLOYMENTS = {
    "openvino": DeploymentSettings_OpenVINO_ONNX(),
    "onnxruntime": DeploymentSettings_ONNXRuntime_ONNX(),
}
SEEN = 5
"""Batches of the calibration data in which ranges are looked for."""
ROUNDS = 40


class LongAttention(torch.nn.Module):
    """Attention of twelve heads over 1,024 tokens, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixed, self.out = torch.nn.Linear(768, 3 * 768), torch.nn.Linear(768, 768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend: ``float32[b, 1024, 768]`` both."""
        parts = self.mixed(x).unflatten(-1, (3, 12, 64)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return self.out(attended.transpose(1, 2).flatten(2))


def _long() -> Prepared:
    spread = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(2, 1024, 768, generator=spread)} for _ in range(8)]
    return Prepared(LongAttention().eval(), data[:4], data[4:], None, is_transformer=True)


def _subject(name: str) -> Callable[[], Prepared]:
    def made() -> Prepared:
        found = SUBJECTS[name]()
        return Prepared(found.make(), found.calibration(), found.test(), None, is_transformer=True)

    return made


MODELS: Mapping[str, Callable[[], Prepared]] = {
    **{name: _subject(name) for name in ("vit_b_16", "swin_t", "encoder")},
    "long": _long,
}


def run(names: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    rows = [row for name in names or MODELS for row in in_fresh_process("benchmarks.attention", name)]
    print_table(COLUMNS, rows)


def main(name: str) -> list[tuple[str, ...]]:
    """Return the rows of one model."""
    prepared = MODELS[name]()
    with torch.no_grad():
        exact = np.concatenate([prepared.model(**batch).numpy() for batch in prepared.test])
    return [(name, *row) for runtime in DEPLOYMENTS for row in _rows(runtime, prepared, exact)]


def _rows(runtime: str, prepared: Prepared, exact: np.ndarray) -> Iterator[tuple[str, ...]]:
    opened = RUNTIMES[runtime].open
    with TemporaryDirectory() as place:
        path = Path(place) / "planned.onnx"
        compiled(prepared.model, prepared.calibration, DEPLOYMENTS[runtime]).clika_export(path)
        attention = Attention(onnx.load(path), runtime)
        ranges = attention.ranges(prepared.calibration[:SEEN])
        runs = {}
        for variant, kinds in VARIANTS.items():
            file = Path(place) / f"{variant}.onnx"
            onnx.save(attention.in_integers(kinds, ranges), file)
            runs[variant] = opened(file)
        feed = {name: tensor[:1].numpy() for name, tensor in prepared.test[0].items()}
        calls = {name: lambda one=one: processor_seconds(lambda: one(feed)) for name, one in runs.items()}
        seconds = in_turn(calls, ROUNDS)
        for variant, one in runs.items():
            found = judged(outputs(one, prepared.test), exact, prepared)
            slower = ratio(seconds[variant], seconds["as planned"])
            numbers = (f"{found['sqnr']:.1f} dB", f"{found['cosine']:.4f}")
            yield runtime, variant, f"{statistics.median(seconds[variant]) * 1e3:.2f}", f"{slower:.2f}", *numbers


@dataclass(frozen=True)
class Attention:
    """A file, and the products of two computed values in it."""

    model: onnx.ModelProto
    runtime: str

    @property
    def products(self) -> dict[str, str]:
        """Of each such product, by the name of what it makes, which of the two it is."""
        fixed, found, softmax = {i.name for i in self.model.graph.initializer}, dict[str, str](), set[str]()
        for node in self.model.graph.node:
            if all(name in fixed for name in node.input):
                fixed.update(node.output)
            elif node.op_type == "Softmax":
                softmax.update(node.output)
            elif node.op_type == "MatMul" and not fixed & {*node.input}:
                found[node.output[0]] = MIXTURES if node.input[0] in softmax else SCORES
        return found

    def ranges(self, batches: Sequence[Batch]) -> dict[str, tuple[float, float]]:
        """Return the least and the greatest element of what these products read."""
        import onnxruntime  # noqa: PLC0415 - the table needs none of it

        shown, products = onnx.ModelProto(), self.products
        shown.CopyFrom(self.model)
        read = dict.fromkeys(n for node in shown.graph.node if node.output[0] in products for n in node.input)
        shown.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in read)
        session = onnxruntime.InferenceSession(shown.SerializeToString(), providers=["CPUExecutionProvider"])
        found = dict.fromkeys(read, (0.0, 0.0))
        for batch in batches:
            results = session.run([*read], {name: tensor.numpy() for name, tensor in batch.items()})
            for name, result in zip(read, results, strict=True):
                low, high = found[name]
                found[name] = min(low, float(result.min())), max(high, float(result.max()))
        return found

    def in_integers(self, kinds: Collection[str], ranges: Mapping[str, tuple[float, float]]) -> onnx.ModelProto:
        """Return the model with pairs before the products of some kinds."""
        made, products = onnx.ModelProto(), self.products
        made.CopyFrom(self.model)
        nodes: list[onnx.NodeProto] = []
        for node in made.graph.node:
            kind = products.get(node.output[0], "")
            for position, name in enumerate([*node.input] if kind in kinds else ()):
                scale, zero = self._scale(kind, position, *ranges[name])
                held = f"{node.output[0]}_{position}"
                numbers = {f"{held}_scale": np.float32(scale), f"{held}_zero": zero}
                made.graph.initializer.extend(numpy_helper.from_array(n, key) for key, n in numbers.items())
                quantize = helper.make_node("QuantizeLinear", [name, *numbers], [f"{held}_q"], f"{held}_q")
                nodes += [quantize, helper.make_node("DequantizeLinear", [f"{held}_q", *numbers], [held], held)]
                node.input[position] = held
            nodes.append(node)
        del made.graph.node[:]
        made.graph.node.extend(nodes)
        onnx.checker.check_model(made)
        return made

    def _scale(self, kind: str, position: int, low: float, high: float) -> tuple[float, Any]:
        """Return the scale and the zero point of an operand."""
        if kind == MIXTURES and position == 0:
            return 1 / 255, np.uint8(0)
        if position == 0 and self.runtime == "onnxruntime":  # which multiplies unsigned ones with signed ones
            scale = (high - low) / 255
            return scale, np.uint8(round(-low / scale))
        return max(-low, high) / 127, np.int8(0)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
