"""Pruning: mask weights by magnitude or in patterns, or remove channels and heads with all their readers."""
