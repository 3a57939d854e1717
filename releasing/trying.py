"""Try an installation without a repository: the first artifact of the README, and every command."""

from __future__ import annotations

import json
import re
from pathlib import Path

from releasing.distributions import ROOT, distributions
from releasing.fresh import Fresh

MAX_README_LINES = 12
"""Maximum lines of the README's example: a first INT8 artifact of the reader's own module."""

OWN = '''"""A model of a newcomer's own."""

import torch


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.Linear(8, 10)

    def forward(self, x):
        return self.linear(torch.relu(self.conv(x)).mean((2, 3)))


model = Network()
'''

INT8_SETTINGS = """
import sys, onnx
kinds = {tensor.data_type for tensor in onnx.load(sys.argv[1]).graph.initializer}
sys.exit(None if onnx.TensorProto.INT8 in kinds else f"{sys.argv[1]} holds no int8")
"""

OTHER_TARGETS = """
import torch
from clika_ref import DeploymentSettings_OpenVINO_ONNX, DeploymentSettings_TensorRT_ONNX, clika_compile

module = clika_compile(torch.nn.Linear(3, 4), tracing_inputs=[torch.rand(2, 3)])
module.clika_export("openvino.xml", deployment_settings=DeploymentSettings_OpenVINO_ONNX())
module.clika_export("tensorrt.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())
module.clika_visualize("picture.html")
module.clika_report("report.html")
"""

NO_COMMAND_LINE = """
import subprocess, sys
done = subprocess.run([sys.executable, "-m", "clika_ref"], capture_output=True, text=True)
sys.exit(None if done.returncode == 1 and "pip install clika-ref-cli" in done.stderr else done.stderr or "it runs")
"""

NO_VISUALIZER = """
import sys, torch
from clika_ref import PluginError, clika_compile

module = clika_compile(torch.nn.Linear(3, 4), tracing_inputs=[torch.rand(2, 3)])
for write in (module.clika_visualize, module.clika_report):
    try:
        write("written.html")
    except PluginError as error:
        if "pip install clika-ref-visualize" not in str(error):
            sys.exit(f"{error} names no command")
    else:
        sys.exit(f"{write.__name__} runs without clika-ref-visualize")
"""


def readme_lines() -> list[str]:
    """Return the README's lines for a first INT8 artifact, with a module of one's own as the model.

    Raises:
        SystemExit: that is more than `MAX_README_LINES`.
    """
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (code,) = [block for block in blocks if "calibration_inputs" in block]
    lines = [line for line in code.splitlines() if line.strip()]
    if len(lines) > MAX_README_LINES:
        raise SystemExit(
            f"try README.md: it needs {len(lines)} lines for a first INT8 artifact. Use at most {MAX_README_LINES}"
        )
    return [re.sub(r"^model = .*", "from own import model", line) for line in lines]


def try_first_artifact(environment: Fresh, folder: Path) -> None:
    """Write a module of one's own and the lines of the README, and run them."""
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    (folder / "first.py").write_text("\n".join(readme_lines()) + "\n", encoding="utf-8")
    with environment.measure_time("the first INT8 artifact, of a module of one's own"):
        environment.run("python", "first.py", cwd=folder)
    environment.run("python", "-c", INT8_SETTINGS, "quantized.onnx", cwd=folder)


def try_commands(environment: Fresh, folder: Path) -> None:
    """Call the installed parts: plugins of each distribution, each type of file in wheels, every target.

    Raises:
        SystemExit: something fails or is missing.
    """
    with environment.measure_time("commands, and a run of the conformance suite"):
        environment.run("pip", "check")
        version = environment.run("clika-ref", "--version").split()[-1]
        output = json.loads(environment.run("clika-ref", "plugins", "--json", cwd=folder))
        expected = {name for found in distributions() for name in _entry_points(found.stated["project"])}
        if output["failures"] or {plugin["name"] for plugin in output["plugins"]} != expected:
            raise SystemExit(f"plugins are {expected}, and found are {output}")
        if {plugin["version"] for plugin in output["plugins"]} != {version}:
            raise SystemExit(f"clika-ref has version {version}, and found are {output}")
        environment.run("clika-ref", "new-plugin", "tried", cwd=folder)
        environment.run("python", "-c", OTHER_TARGETS, cwd=folder)
        environment.run("clika-ref", "check", "tensorrt.onnx", "--target", "tensorrt", cwd=folder)
        suite = ("conformance", "run", "--target", "onnxruntime", "-k", "operators/relu6/", "--out", "report")
        environment.run("clika-ref", *suite, cwd=folder)
        if not (folder / "report/index.html").exists():
            raise SystemExit("the conformance suite wrote no page")


def try_missing_plugins(environment: Fresh, folder: Path, wheels: Path) -> None:
    """Uninstall the command line, pictures and the suite, check the errors, and install them as the errors suggest.

    Raises:
        SystemExit: an error is missing or names no command, or the command fails.
    """
    optional = ("clika-ref-conformance", "clika-ref-visualize", "clika-ref-cli")
    with environment.measure_time("errors of missing plugins"):
        environment.run("pip", "uninstall", "--quiet", "--yes", *optional)
        environment.run("python", "-c", NO_COMMAND_LINE, cwd=folder)
        environment.run("python", "-c", NO_VISUALIZER, cwd=folder)
        environment.install("missing plugins", "--find-links", str(wheels), *optional)
        environment.run("python", "-m", "clika_ref", "--version", cwd=folder)


def _entry_points(project: dict[str, dict[str, dict[str, str]]]) -> list[str]:
    return [*project.get("entry-points", {}).get("clika_ref", {})]
