"""Pagefold in other people's engines. Each room here imports its engine only when that engine asks for it."""
