"""The judge: a float64 reference, bounds by error class, jitter through graphs, and steps 0 to 5 in order."""
