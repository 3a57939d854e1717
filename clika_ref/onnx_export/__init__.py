"""ONNX export of a graph, shared by all ONNX targets: the builder that lowerings receive, emission, and writing."""
