"""Tools: what a client lets the model call, how models write calls, and how their text is read back."""
