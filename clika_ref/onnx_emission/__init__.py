"""From a graph to an ONNX model: the builder that lowerings receive, emission, and writing; shared by all ONNX targets."""
