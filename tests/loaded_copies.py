"""Copies of compiled modules by their state dict."""

from clika_ref import ClikaModule


def load_copy(module):
    """Load the state dict of a module into an empty one."""
    loaded = ClikaModule()
    loaded.load_state_dict(module.state_dict())
    return loaded
