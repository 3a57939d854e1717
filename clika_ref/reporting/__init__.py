"""What a person sees of a compilation: its log, progress bars and tables."""
