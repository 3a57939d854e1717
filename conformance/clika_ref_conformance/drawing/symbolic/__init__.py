"""Graphs with dynamic sides, and inputs of many lengths for them."""
