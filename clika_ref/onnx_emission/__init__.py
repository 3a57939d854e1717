"""From a graph to an ONNX model: the builder that lowerings receive, emission, and writing; for all ONNX targets."""
