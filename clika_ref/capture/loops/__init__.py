"""Python loops over positions, which a trace unrolls, and branches on sizes: one graph for every length."""
