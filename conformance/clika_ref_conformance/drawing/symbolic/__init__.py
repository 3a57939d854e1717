"""Graphs with dynamic dims, and inputs of many sizes for them."""
