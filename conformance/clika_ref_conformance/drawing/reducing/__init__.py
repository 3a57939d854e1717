"""Reduction of a failing case: fewer nodes, simpler elements, and shorter or static dims."""
