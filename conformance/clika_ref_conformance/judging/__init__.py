"""Judge results by a float64 reference, bounds by error class and jitter through graphs, in steps 0 to 5."""
