"""Calls that the graph computes by simpler calls: what a kernel of PyTorch computes, written in operators."""
