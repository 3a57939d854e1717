"""Record the files, outputs and signatures of one commit, and compare later commits with them."""
