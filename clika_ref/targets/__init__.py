"""Data that targets declare: quantization schemes, arithmetic and file formats."""
