"""Build the distributions, install them in empty environments, and try them there."""
