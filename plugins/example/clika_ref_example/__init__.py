"""An example to copy: a plugin with one operator, one pass and one target."""
