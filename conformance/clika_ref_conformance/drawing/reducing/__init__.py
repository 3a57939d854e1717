"""A failing case made small: fewer nodes, plainer elements, shorter and fixed sides."""
