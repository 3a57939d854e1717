"""The levels of the suite, from the contract of a declaration up to artifacts in a fresh process."""
