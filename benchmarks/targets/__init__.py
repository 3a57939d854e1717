"""What OpenVINO and TensorRT make of whole architectures, and NNCF beside it."""
