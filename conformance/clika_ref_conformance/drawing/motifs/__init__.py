"""Motifs, which are minimal graphs that a pass rewrites, and near misses that it must leave alone."""
