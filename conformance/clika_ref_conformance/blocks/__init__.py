"""Small blocks of real architectures, in plain PyTorch, with weights of a fixed seed."""
