"""Measure speed, memory and accuracy: ``python -m benchmarks``, or one benchmark by name."""
