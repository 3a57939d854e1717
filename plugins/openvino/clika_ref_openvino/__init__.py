"""OpenVINO as a target."""
