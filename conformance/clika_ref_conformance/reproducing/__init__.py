"""Failures as files: graph, inputs and expected results, packed so that they run again without the suite."""
