"""Failures as files: graph, inputs and what is right, packed so that they run again without the suite."""
