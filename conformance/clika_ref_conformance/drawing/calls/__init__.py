"""Calls of one operator: what its samples describe, drawn by two of the drivers, and the tensors that they get."""
