"""OpenAI's Responses: a newer form of chats, whose server remembers, for as long as it has room."""

from pagefold.server.responses.routes import response_routes
from pagefold.server.responses.store import ResponseStore

__all__ = ["ResponseStore", "response_routes"]
