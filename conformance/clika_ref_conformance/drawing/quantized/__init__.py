"""Quantized test graphs: ranges, and layers between quantized tensors with their exact results."""
