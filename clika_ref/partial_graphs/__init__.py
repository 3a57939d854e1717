"""Partial graphs: a model that Dynamo breaks into several graphs, each compiled with the weights it is called with."""
