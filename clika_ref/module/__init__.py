"""`ClikaModule`: the compiled module, its state dict and its files."""
