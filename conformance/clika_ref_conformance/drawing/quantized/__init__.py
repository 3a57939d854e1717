"""Graphs of integers: ranges, and layers between quantized tensors with their exact results."""
