"""Conformance suite: checks operators, passes and targets against eager PyTorch and reports each failure."""
