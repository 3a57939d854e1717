"""A custom pass between two stages: the SQNR in INT8 if every SiLU becomes a Hardswish before calibration.

`python examples/insert_a_pass.py` takes ten seconds. docs/stages.md runs every stage by hand.
"""

import torch
from torch import Tensor, nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, stages
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Node, Value
from clika_ref.core.rewriter import apply_rules, rule


@rule("silu")
def silu_to_hardswish(node: Node, build: Builder) -> Value:
    """Replace ``silu(x)`` by ``hardswish(x)``: an experiment, since passes of plugins must not change results."""
    return build("hardswish", node.inputs[0])


def main(model: nn.Module, data: list[Tensor]) -> None:
    """Print the SQNR of the quantized model against float, with and without the pass."""
    registry, callee, log = stages.load_registry(), stages.make_callable(model), stages.CompilationLog()
    target = stages.target_for(DeploymentSettings_ONNXRuntime_ONNX(), registry)
    request, batches = stages.QuantizationRequest(target, QuantizationSettings()), [[x] for x in data[1:]]
    for name, rules in {"as it is": [], "with Hardswish": [silu_to_hardswish]}.items():
        graph = stages.capture(callee, stages.make_calls(callee, data[:1]), registry).graph
        stages.clean_graph(graph, registry)
        replaced = apply_rules(graph, rules, registry.operators)  # the custom pass
        calibration = stages.prepare_calibration(graph, request, registry)
        pipeline = stages.calibrate_graph(calibration, batches, request, registry, log, model=graph)
        quantized = stages.quantize_for_target(graph, pipeline.decide().plan, target, registry)
        (exact,), (found,) = (stages.interpret(g, data[:1])[0] for g in (graph, quantized))
        own, whole = sqnr(exact, found), sqnr(model(data[0]), found)
        print(
            f"{name}: {replaced} of {len(graph)} nodes replaced, {own:.1f} dB against its own float, "
            f"{whole:.1f} dB against the model"
        )


def sqnr(exact: Tensor, found: Tensor) -> float:
    """Return the ratio of signal to noise in dB."""
    return float(10 * torch.log10(exact.square().sum() / (exact - found).square().sum()))


if __name__ == "__main__":
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.SiLU(), nn.Flatten(), nn.Linear(256, 5)]
    with torch.no_grad():
        main(nn.Sequential(*layers).eval(), [torch.randn(8, 3, 8, 8) for _ in range(8)])
