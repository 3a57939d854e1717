"""The minimal core: the IR, the declarations of operators, passes and targets, and the plugin registry."""
