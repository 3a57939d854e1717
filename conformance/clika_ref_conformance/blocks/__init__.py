"""Small blocks of real architectures, in plain PyTorch, with weights from a fixed seed."""
