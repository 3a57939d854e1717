"""From the samples of operators to calls, tensors and graphs: three drivers that read one description."""
