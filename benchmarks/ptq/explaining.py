"""Report the precision of a quantized subject in a runtime: ``python -m benchmarks.ptq.explaining openvino FOLDER``."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

from benchmarks.ptq.quantizers import compile_quantized
from benchmarks.ptq.subjects import read
from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, DeploymentSettings_OpenVINO_ONNX

DEPLOYMENTS = {"onnxruntime": DeploymentSettings_ONNXRuntime_ONNX(), "openvino": DeploymentSettings_OpenVINO_ONNX()}


def main(runtime: str, folder: str) -> dict[str, float]:
    """Return the share of MACs planned in INT8, and the share of these layers that run in INT8."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    prepared = read(Path(folder))
    explained = compile_quantized(prepared.model, prepared.calibration, DEPLOYMENTS[runtime]).clika_explain()
    planned = [node for node in explained.nodes if node.macs and node.planned != "float"]
    missed = sum(node in explained.not_quantized for node in planned)
    return {
        "planned": explained.share(planned=True),
        "in integers": 1 - missed / len(planned) if planned else 0.0,
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
