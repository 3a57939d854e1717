"""The ``clika-ref`` commands: their arguments, and the printed form of models, plugins and operators."""
