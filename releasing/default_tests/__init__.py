"""Show what `make test` leaves to `make test-all`: coverage of both, and the seeded faults that each finds."""
