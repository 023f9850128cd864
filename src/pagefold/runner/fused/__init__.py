"""A whole decoder as one compiled function, for the families that are used most; transformers' own is its slow twin."""
