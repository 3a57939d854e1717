"""A compiled module below its nn.Module: state, weights, lowering for a target, and the three ways to run."""
