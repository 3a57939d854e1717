"""Post-training quantization beside its peers: time, memory, latency, size and accuracy, in one run."""
