"""Torch starts here: models, attention, the tensors of the blocks, sampling."""
