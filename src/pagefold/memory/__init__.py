"""Memory: what fits into that of a machine and of a card, and what is taken of it."""
