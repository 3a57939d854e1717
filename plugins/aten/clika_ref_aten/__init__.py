"""PyTorch's ATen operators, declared by family."""
