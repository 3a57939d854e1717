"""Integrations with other parts of PyTorch: the ``torch.compile`` backend and distributed training."""
