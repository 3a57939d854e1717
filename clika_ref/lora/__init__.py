"""Low-rank adapters: small matrices beside layers, which train in place of weights that stay as they are."""
