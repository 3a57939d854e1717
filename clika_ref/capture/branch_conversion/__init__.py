"""Data-dependent branches in Python code become conditions and loops of the graph."""
