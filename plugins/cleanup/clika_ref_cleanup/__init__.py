"""Passes that make a captured graph smaller without changing its meaning, one in each file."""
