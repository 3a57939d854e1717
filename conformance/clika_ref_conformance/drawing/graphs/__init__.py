"""Random graphs from the third driver, which reuses existing values as operands."""
