"""Measure HTML reports of quantized models: the file size, and the time until a browser has drawn the page."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.models import MODELS

# isort: split
from playwright.sync_api import Playwright, sync_playwright

from benchmarks.measuring import Names, format_verdict
from clika_ref import ClikaModule, DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref.reporting.tables import print_table

SUBJECTS = ("vit_b_16", "resnet18")

MAX_SECONDS, MAX_MEGABYTES = 2.0, 3.0
"""Limits of the time until a page is drawn, and of its size."""

TABLE_FILLED_SCRIPT = "document.querySelectorAll('#layers-table tbody tr').length > 0"
FRAME_DRAWN_SCRIPT = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Resolves in the frame after the next one. By then the layout is painted."""


def run(names: Names = None, rounds: int = 5) -> None:
    """Measure HTML reports: size, and time until headless Chromium has drawn them; needs Chromium."""
    for name in names or SUBJECTS:
        with TemporaryDirectory() as folder, sync_playwright() as playwright:
            path = Path(folder) / "report.html"
            nodes = _write_report(name, path)
            seconds = [_measure_drawing(playwright, path) for _ in range(rounds)]
            megabytes = path.stat().st_size / 1e6
        min_max = [f"{s:.2f} s" for s in (min(seconds), max(seconds))]
        print_table(("model", "nodes", "file", "fastest", "slowest"), [(name, nodes, f"{megabytes:.2f} MB", *min_max)])
        print(
            f"{name}: seconds from the start of Chromium to the drawn page: {format_verdict(max(seconds), MAX_SECONDS)}"
        )
        print(f"{name}: size of the page in MB: {format_verdict(megabytes, MAX_MEGABYTES)}")


def _write_report(name: str, path: Path) -> int:
    """Quantize a model, write its report, and return its number of nodes."""
    model = MODELS[name]()
    data = [model.inputs(4) for _ in range(4)]
    module = clika_compile(
        model.make(),
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    assert isinstance(module, ClikaModule)
    module.clika_report(path)
    return len(module.graph)


def _measure_drawing(playwright: Playwright, path: Path) -> float:
    """Start a browser, open a page, and return the seconds until it is drawn."""
    program = os.environ.get("CLIKA_REF_CHROMIUM") or shutil.which("chromium")
    start = time.perf_counter()
    with playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"]) as browser:
        page = browser.new_page()
        page.goto(path.as_uri())
        page.wait_for_function(TABLE_FILLED_SCRIPT)
        page.evaluate(FRAME_DRAWN_SCRIPT)
        return time.perf_counter() - start
