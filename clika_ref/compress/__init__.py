"""Compression of a compiled module: calibrate, quantize, compare targets."""
