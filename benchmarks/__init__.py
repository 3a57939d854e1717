"""Measure the figures that the project promises: ``python -m benchmarks``, or one part of them by name."""
