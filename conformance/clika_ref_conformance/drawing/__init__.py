"""Generation of calls, tensors and graphs from the samples of operators, by three drivers."""
