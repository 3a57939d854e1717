"""Compression of a compiled module: calibrate, quantize, prune, add adapters."""
