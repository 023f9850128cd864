"""transformers' models with layers of ours in them: packed weights, multiplied by the tiles of any product format."""
