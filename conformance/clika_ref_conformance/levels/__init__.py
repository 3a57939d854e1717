"""Levels of the suite, from the contract of a declaration to artifacts in a fresh process."""
