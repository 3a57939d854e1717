"""Capture: a module or callable and its tracing inputs to a graph."""
