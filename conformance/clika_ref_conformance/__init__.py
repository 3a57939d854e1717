"""The conformance suite: proves operators, passes and targets right, or shows where they are not."""
