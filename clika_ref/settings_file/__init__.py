"""Settings as YAML: parsing with line numbers, conversion to settings, and writing."""
