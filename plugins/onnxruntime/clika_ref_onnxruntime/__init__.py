"""ONNX Runtime as a target."""
