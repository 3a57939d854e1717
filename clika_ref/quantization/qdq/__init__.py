"""Q/DQ: placement, quantization parameters, and insertion of quantize and dequantize nodes."""
