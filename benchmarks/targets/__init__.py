"""Compare whole architectures on OpenVINO and TensorRT with NNCF."""
