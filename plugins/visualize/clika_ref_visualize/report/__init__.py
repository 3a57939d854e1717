"""Reports on a module, as plain data and as one HTML file."""
