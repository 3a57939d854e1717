"""Capture a module or callable, with its tracing inputs, as a graph."""
