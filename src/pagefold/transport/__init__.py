"""Transport: how a block's bytes are packed when it leaves the machine's memory, and restored."""
