"""Finding the target under test, and the identity target: eager itself."""
