"""Pictures of graphs: what a model computes, module by module, and what of it in integers."""
