"""Where blocks are beside the device: it carries out what ``kv`` decides, and trusts no byte that comes back."""

from pagefold.store.arena import HostArena

__all__ = ["HostArena"]
