"""Settings classes, their validation, and settings files in YAML."""
