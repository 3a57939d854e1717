"""Data that an interrupt ends, as a user who presses Ctrl+C does."""


def interrupt_after(batches):
    """Yield batches, and raise KeyboardInterrupt at the end."""
    yield from batches
    raise KeyboardInterrupt
