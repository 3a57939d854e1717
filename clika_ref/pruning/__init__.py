"""Pruning: weights become zeros by magnitude or in patterns, or channels and heads go with all that reads them."""
