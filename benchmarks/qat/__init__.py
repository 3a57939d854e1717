"""Compare one step of quantization-aware training with one in float and with peers, in one run."""
