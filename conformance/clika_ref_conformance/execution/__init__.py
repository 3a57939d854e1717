"""Execution of a plan: one check, one task in its own worker, a whole run with its accounting."""
