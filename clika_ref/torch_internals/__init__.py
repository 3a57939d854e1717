"""The private names of PyTorch that the project uses, by subject: no other package names one.

A name that a version of PyTorch moves is changed here. tests/torch_internals names the version and what moved.
"""
