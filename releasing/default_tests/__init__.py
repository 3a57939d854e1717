"""Compare `make test` with `make test-all`: coverage of both, and the seeded faults that each finds."""
