"""Operators of torchvision, and forms of its detectors' functions that traces need."""
