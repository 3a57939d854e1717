"""Console output of a compilation: log, progress bars and tables."""
