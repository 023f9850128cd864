"""Reasoning: how models mark what they think before they answer, and how it is told from the answer."""
