"""Passes that simplify a captured graph without changing its meaning, one per file."""
