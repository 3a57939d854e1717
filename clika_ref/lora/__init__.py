"""Low-rank adapters (LoRA): small matrices in parallel to layers, trained in place of the frozen weights."""
