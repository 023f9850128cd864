"""Pages of HTML that stand alone, and their charts."""
