"""Pictures of graphs, and reports of modules."""
