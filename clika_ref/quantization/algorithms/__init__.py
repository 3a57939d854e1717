"""Quantization algorithms: sensitivity, mixed precision, SmoothQuant, GPTQ, AWQ and bias correction."""
