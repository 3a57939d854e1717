"""An example plugin with an operator, a pass and a target, as a starting point for your own."""
