"""The pictures of the documentation: `make pictures` draws all of them into `docs/pictures`."""
