"""Masks: which older tokens a query sees. What positions and the prefix alone decide can be shared and compared."""
