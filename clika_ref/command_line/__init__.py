"""The commands of ``clika-ref``: their arguments, and what they show of plugins and operators."""
