"""What is known of a module, gathered as plain data, and as one HTML file that shows it."""
