"""Several processes that work on one model: what they tell each other, and what they make of it together."""
