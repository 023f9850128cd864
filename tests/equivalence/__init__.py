"""The equality rule of DESIGN.md as a suite: settings, models, prompts and references that any engine is held to."""
