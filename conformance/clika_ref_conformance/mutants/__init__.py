"""Seeded faults, applied in memory, which the suite must find: the test of the tests."""
