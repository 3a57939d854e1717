"""What the project promises in numbers, measured: ``python -m benchmarks``, or one part of it by name."""
