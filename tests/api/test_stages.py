"""`clika_ref.stages`: each name is documented, and the stages give `clika_export`'s file."""

import copy
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    LoraSettings,
    PruningSettings,
    QuantizationSettings,
    clika_compile,
    stages,
)

ROOT = Path(__file__).parents[2]


MODULE_BY_STAGE_NAME = {
    name: module
    for module, name in re.findall(
        r"^from clika_ref\.([\w.]+) import (\w+) as \2$", inspect.getsource(stages), re.MULTILINE
    )
}
"""Read from the source, as type checkers do."""


def test_stages_offers_its_imports_only():
    assert sorted(name for name in vars(stages) if not name.startswith("_")) == sorted(MODULE_BY_STAGE_NAME)


@pytest.mark.parametrize("name", MODULE_BY_STAGE_NAME)
def test_stage_name_is_documented_where_it_is_defined(name):
    found = getattr(stages, name)
    assert inspect.isclass(found) or callable(found)
    assert found.__module__ == f"clika_ref.{MODULE_BY_STAGE_NAME[name]}"
    first, *_ = (inspect.getdoc(found) or "").splitlines() or [""]
    assert first.rstrip().endswith((".", ",", ":")), f"{name} is not documented"


def test_table_of_the_docstring_lists_each_function():
    """It also lists classes that act as a stage; the others are results."""
    listed = re.findall(r"^\| [\w /-]*\| `(\w+)` \|", inspect.getdoc(stages) or "", re.MULTILINE)
    functions = {name for name in MODULE_BY_STAGE_NAME if not inspect.isclass(getattr(stages, name))}
    assert len(listed) == len({*listed})
    assert {*listed} >= functions
    assert {*listed} <= {*MODULE_BY_STAGE_NAME}


def test_page_calls_each_stage():
    text = (ROOT / "docs/stages.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    functions = {name for name in MODULE_BY_STAGE_NAME if not inspect.isclass(getattr(stages, name))}
    assert {name for name in functions if f"stages.{name}" not in code} == set()


class Separable(nn.Module):
    """A depthwise-separable convolution with batch norm, and a classifier."""

    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.pointwise = nn.Conv2d(8, 16, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        y = self.norm(self.depthwise(x)).relu()
        y = self.pointwise(y).relu() + 0
        return self.head(y.mean((2, 3)))


DEPLOYMENTS = [DeploymentSettings_ONNXRuntime_ONNX(), DeploymentSettings_OpenVINO_ONNX()]
REQUESTS = {
    "quantized": {},
    "weight-only": {
        "quantization_settings": QuantizationSettings(prefer_weights_only_quantization=True, weights_num_bits=8)
    },
    "pruned": {"pruning_settings": PruningSettings("structured", None, 0.25)},
    "with adapters": {"clika_compile_options": ClikaCompileOptions(global_lora_settings=LoraSettings(rank=2))},
}


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment.target)
@pytest.mark.parametrize("request_name", REQUESTS)
def test_stages_by_hand_write_the_bytes_of_clika_export(request_name, deployment, tmp_path):
    """The steps called one by one write the same bytes as `clika_export`, as on docs/stages.md."""
    torch.manual_seed(0)
    model = Separable().eval()
    tracing, batches = [torch.rand(2, 8, 6, 6), torch.rand(3, 8, 6, 6)], [torch.rand(8, 8, 6, 6) for _ in range(3)]
    chosen = {"quantization_settings": QuantizationSettings(), **REQUESTS[request_name]}
    torch.manual_seed(1)
    module = clika_compile(
        copy.deepcopy(model),
        tracing_inputs=tracing,
        calibration_inputs=batches,
        deployment_settings=deployment,
        **chosen,
    )
    expected = module.clika_export(tmp_path / "expected.onnx").path.read_bytes()

    torch.manual_seed(1)
    registry, log, inputs = stages.load_registry(), stages.CompilationLog(), [[batch] for batch in batches]
    callee = stages.make_callable(model)
    captured = stages.capture(callee, stages.make_calls(callee, tracing), registry, fallback=stages.torchlib_operator)
    graph, options = captured.graph, chosen.get("clika_compile_options", ClikaCompileOptions())
    assert any(report.changed for report in stages.clean_graph(graph, registry, [tracing[0]]))
    if "pruning_settings" in chosen:
        wanted = stages.PruningRequest(chosen["pruning_settings"], {})
        stages.prune_graph(graph, wanted, inputs, registry.operators, log)
    if options.global_lora_settings is not None:
        stages.attach_adapters(graph, options.global_lora_settings, registry.operators, log)
    target = stages.target_for(deployment, registry)
    request = stages.QuantizationRequest(target, chosen["quantization_settings"], options=options)
    calibration = stages.prepare_calibration(graph, request, registry)
    pipeline = stages.calibrate_graph(calibration, inputs, request, registry, log, model=graph)
    plan = stages.decide_quantization(pipeline, graph, request, registry, log).plan
    assert not plan.is_empty
    written = stages.quantize_for_target(graph, plan, target, registry)
    names = [value.name for value in graph.inputs]
    stages.name_interface(written, registry.operators, names, captured.signature.output_names(names))
    assert target.compile(written, tmp_path / "by-hand.onnx").path.read_bytes() == expected
