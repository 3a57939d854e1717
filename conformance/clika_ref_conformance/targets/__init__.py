"""The target under test, and the identity target, which is eager itself."""
