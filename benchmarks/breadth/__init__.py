"""The list of architectures that are compiled, and how they are measured: ``python -m benchmarks breadth``."""
