"""Serialization of graphs and signatures as JSON. Reading never executes code."""
