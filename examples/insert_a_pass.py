"""A pass between two stages: what do integers gain where every SiLU becomes a Hardswish before calibration?

`python examples/insert_a_pass.py` takes ten seconds. docs/how-it-works.md shows what each stage hands to the next.
"""

import torch
from torch import Tensor, nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings
from clika_ref.capture.callables import make_callable
from clika_ref.capture.capture import capture
from clika_ref.capture.inputs import make_calls
from clika_ref.compiled.lowering import quantize_for_target, target_for
from clika_ref.compress.calibration_pass import prepare_calibration
from clika_ref.compress.graph_quantization import calibrate_graph
from clika_ref.core.execution import interpret
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Node, Value
from clika_ref.core.passes import Phase, Pipeline
from clika_ref.core.registry import load_registry
from clika_ref.core.rewriter import apply_rules, rule
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.reporting.log import CompilationLog


@rule("silu")
def silu_to_hardswish(node: Node, build: Builder) -> Value:
    """``hardswish(x)`` for ``silu(x)``: other numbers, so it is no pass that a plugin may add, but an experiment."""
    return build("hardswish", node.inputs[0])


def main(model: nn.Module, data: list[Tensor]) -> None:
    """Print the SQNR of integers against float, as the model is and with the pass in between."""
    registry, callee, log, batches = load_registry(), make_callable(model), CompilationLog(), [[x] for x in data[1:]]
    spec = QuantizationRequest(target_for(DeploymentSettings_ONNXRuntime_ONNX(), registry), QuantizationSettings())
    for name, rules in {"as it is": [], "with Hardswish": [silu_to_hardswish]}.items():
        graph = capture(callee, make_calls(callee, data[:1]), registry).graph
        Pipeline.of(registry.passes, registry.operators, Phase.CLEAN).run(graph)
        fired = apply_rules(graph, rules, registry.operators)  # the pass of one's own
        stages = calibrate_graph(prepare_calibration(graph, spec, registry), batches, spec, registry, log, model=graph)
        integers = quantize_for_target(graph, stages.decided().plan, spec.target, registry)
        (exact,), (found,), original = interpret(graph, data[:1])[0], interpret(integers, data[:1])[0], model(data[0])
        own, whole = sqnr(exact, found), sqnr(original, found)
        print(f"{name}: {fired} nodes replaced, {own:.1f} dB against its own float, {whole:.1f} dB against the model")


def sqnr(exact: Tensor, found: Tensor) -> float:
    """Return the ratio of signal to noise in dB."""
    return float(10 * torch.log10(exact.square().sum() / (exact - found).square().sum()))


if __name__ == "__main__":
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.SiLU(), nn.Flatten(), nn.Linear(256, 5)]
    with torch.no_grad():
        main(nn.Sequential(*layers).eval(), [torch.randn(8, 3, 8, 8) for _ in range(8)])
