"""Whole graphs: the third driver, which answers descriptions of tensors by values that exist."""
