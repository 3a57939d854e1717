"""Compare INT8 with float for two detectors that are trained on rendered shapes: mAP and latency."""
