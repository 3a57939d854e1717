"""Pictures, reports and notebooks of a module without the plugin that draws and writes them."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from calibrated_nets import compile_net, trace_net

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, PluginError
from clika_ref.core.registry import load_registry
from clika_ref.core.visualizers import Visualizer
from clika_ref.export.visualization import PictureFacts, ReportFacts

INSTALL = (
    "pip install clika-ref-visualize (in a clone: pip install plugins/visualize; from wheels: add --find-links FOLDER)"
)


@pytest.fixture
def without_visualizer(monkeypatch):
    """Load only plugins without a visualizer."""
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,onnxruntime")


@pytest.mark.parametrize("method", ["clika_visualize", "clika_report"])
def test_clika_module_without_visualizer_names_package(without_visualizer, monkeypatch, method, tmp_path):
    message = (
        rf"^{method}: no loaded plugin draws pictures and writes reports \(loaded: aten, cleanup, onnxruntime\)\. "
        rf"Run {re.escape(INSTALL)}\."
    )
    limit = r" \$CLIKA_REF_PLUGINS limits which plugins are loaded\."
    with pytest.raises(PluginError, match=f"{message}{limit}$"):
        getattr(trace_net(), method)(tmp_path / "file.html")
    assert not [*tmp_path.iterdir()]
    module = trace_net()
    module.clika_state.registry = load_registry()
    monkeypatch.delenv("CLIKA_REF_PLUGINS")
    with pytest.raises(PluginError, match=f"{message}$"):
        getattr(module, method)(tmp_path / "file.html")


def test_notebook_html_without_visualizer_names_package(without_visualizer):
    shown = compile_net()._repr_html_()
    assert f"<p>To draw it, run {INSTALL}.</p>" in shown
    assert "<svg" not in shown
    assert "<th" in shown


class RecordingVisualizer(Visualizer):
    """Keeps the facts that it is given."""

    name = "recording"

    def __init__(self):
        self.facts = []

    def picture_path(self, path):
        return Path(path).with_suffix(".svg")

    def draw(self, facts, path):
        self.facts.append(facts)
        path.write_text("picture")

    def render_svg(self, facts):
        self.facts.append(facts)
        return "<svg/>"

    def write_report(self, facts, file, step):
        step("writing")
        self.facts.append(facts)
        assert isinstance(file, io.IOBase)
        file.write(b"report")
        return "1 node"


@pytest.fixture
def visualizer():
    return RecordingVisualizer()


@pytest.fixture
def module(visualizer):
    """A quantized module whose only visualizer is the recording one."""
    found = compile_net()
    found.clika_state.registry = replace(load_registry(), visualizers={visualizer.name: visualizer})
    return found


def test_clika_visualize_gives_the_visualizer_the_quantized_graph(module, visualizer, tmp_path):
    explanation = module.clika_explain()
    assert module.clika_visualize(tmp_path / "model", explanation=explanation) == tmp_path / "model.svg"
    (facts,) = visualizer.facts
    assert isinstance(facts, PictureFacts)
    assert "quantize" in {node.op_type for node in facts.graph.nodes}
    assert (facts.plan, facts.explanation) == (module.clika_state.quantized.plan, explanation)
    assert facts.subtitle.startswith("as for onnxruntime")


def test_clika_report_passes_facts_to_visualizer(module, visualizer, tmp_path):
    deployment = DeploymentSettings_ONNXRuntime_ONNX()
    assert module.clika_report(tmp_path / "report.html", [deployment]).read_bytes() == b"report"
    (facts,) = visualizer.facts
    assert isinstance(facts, ReportFacts)
    assert (facts.target.name, [row.target for row in facts.others]) == ("onnxruntime", ["onnxruntime"])
    assert facts.found is module.clika_quantization
    assert facts.settings.deployment_settings == deployment


def test_notebook_html_shows_the_picture_of_the_visualizer(module, visualizer):
    assert "<svg/></div>" in module._repr_html_()
    assert len(visualizer.facts) == 1
