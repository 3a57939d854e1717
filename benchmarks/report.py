"""The report of a quantized model: how large its page is, and how long a browser takes until it is drawn."""

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

SECONDS, MEGABYTES = 2.0, 3.0
"""How long a page may take until it is drawn, and how large it may be."""

TABLE_FILLED_SCRIPT = "document.querySelectorAll('#layers-table tbody tr').length > 0"
FRAME_DRAWN_SCRIPT = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Done once what is laid out has been painted: behind the frame after the next."""


def run(names: Names = None, rounds: int = 5) -> None:
    """Pages of reports: size, and time until headless Chromium has drawn them; needs Chromium, not part of all."""
    for name in names or SUBJECTS:
        with TemporaryDirectory() as folder, sync_playwright() as playwright:
            path = Path(folder) / "report.html"
            nodes = _write_report(name, path)
            seconds = [_seconds_to_drawn(playwright, path) for _ in range(rounds)]
            megabytes = path.stat().st_size / 1e6
        shown = [f"{s:.2f} s" for s in (min(seconds), max(seconds))]
        print_table(("model", "nodes", "file", "fastest", "slowest"), [(name, nodes, f"{megabytes:.2f} MB", *shown)])
        print(f"{name}: seconds from the start of Chromium to what is drawn: {format_verdict(max(seconds), SECONDS)}")
        print(f"{name}: MB of the page: {format_verdict(megabytes, MEGABYTES)}")


def _write_report(name: str, path: Path) -> int:
    """Quantize a model, write its report, and return how many nodes it has."""
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


def _seconds_to_drawn(playwright: Playwright, path: Path) -> float:
    """Start a browser, open a page in it, and return when it was drawn."""
    program = os.environ.get("CLIKA_REF_CHROMIUM") or shutil.which("chromium")
    start = time.perf_counter()
    with playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"]) as browser:
        page = browser.new_page()
        page.goto(path.as_uri())
        page.wait_for_function(TABLE_FILLED_SCRIPT)
        page.evaluate(FRAME_DRAWN_SCRIPT)
        return time.perf_counter() - start
