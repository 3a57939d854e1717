"""TensorRT as a target, and a checker of ONNX files for it."""
