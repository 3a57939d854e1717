"""Sessions of ONNX Runtime for the files that tests export."""

import onnxruntime


def open_session(path):
    """Open a file in ONNX Runtime on the CPU."""
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
