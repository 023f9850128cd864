"""Attention over blocks on NVIDIA cards, in Triton. Importing the room imports no Triton; ``attention`` does."""
