"""Compare post-training quantization with its peers: time, memory, latency, size and accuracy, in one run."""
