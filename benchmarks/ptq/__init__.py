"""Compare post-training quantization with ONNX Runtime and NNCF: time, memory, latency, size and accuracy."""
