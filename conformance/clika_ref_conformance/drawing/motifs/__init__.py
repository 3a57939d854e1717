"""Graphs on which a pass fires, and near misses on which it must not."""
