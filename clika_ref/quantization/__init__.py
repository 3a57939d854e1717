"""Quantization: from calibration data to scales, and to a graph with quantized values and weights."""
