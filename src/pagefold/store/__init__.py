"""Where blocks are beside the device: it carries out what ``kv`` decides, and trusts no byte that comes back."""

from pagefold.kv.transfers import MissCause, StoreError
from pagefold.store.arena import HostArena
from pagefold.store.frame import FrameFormat
from pagefold.store.open import open_stores
from pagefold.store.protocol import BlockStore, Get, Put, SelfTest, StoreUse
from pagefold.store.transfer_threads import TransferThreads

__all__ = [
    "BlockStore",
    "FrameFormat",
    "Get",
    "HostArena",
    "MissCause",
    "Put",
    "SelfTest",
    "StoreError",
    "StoreUse",
    "TransferThreads",
    "open_stores",
]
