"""Quantize whole architectures for OpenVINO and TensorRT."""
