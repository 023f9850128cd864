"""Anthropic's Messages: the same model behind another API."""

from pagefold.server.anthropic.errors import AnthropicErrors
from pagefold.server.anthropic.routes import message_routes

__all__ = ["AnthropicErrors", "message_routes"]
