"""Several processes that work on one model: their communication, and the merging of their results."""
