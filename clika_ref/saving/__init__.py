"""What is written and read back: graphs and signatures as JSON, of which nothing is executed."""
