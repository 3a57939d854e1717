"""Calls of a single operator, drawn by two of the drivers from its samples, and their input tensors."""
