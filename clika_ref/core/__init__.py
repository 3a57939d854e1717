"""The minimal core: the IR, how an operator, a pass and a target are declared, and how plugins provide them."""
