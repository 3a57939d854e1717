"""Settings as YAML: a file as a tree that knows its lines, what of it becomes settings, and the way back."""
