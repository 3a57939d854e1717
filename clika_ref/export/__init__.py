"""Export the graph of a ClikaModule to a verified artifact: its interface, its writing, and the comparison."""
