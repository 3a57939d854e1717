"""Calibration: observers, histograms and the table of activation ranges."""
