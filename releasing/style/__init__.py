"""The check of terms and the figures of style, which `make lint` runs."""
