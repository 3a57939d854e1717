"""Pictures of graphs, module by module, with the parts that run in INT8 highlighted."""
