"""Quality: what a setting of the engine costs in what the model says, against the exact cache."""
