"""Quantization-aware training: fake quantization, learned scales and distillation."""
