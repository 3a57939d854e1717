"""Outputs of a run: JSON, JUnit XML, an HTML matrix, reproducers."""
