"""Mutation testing of the suite: seeded faults, applied in memory, that it must find."""
