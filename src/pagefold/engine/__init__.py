"""The loop: requests in, steps run, deltas out. Sees the scheduler and the ``Runner`` protocol."""
