"""The door: OpenAI's HTTP API over an ``EngineClient``. It sees the engine, never the core.

A request comes in through ``app`` and ``body_limit``, is read by ``schemas``, becomes a ``Generation`` in
``completions``, ``chat`` or ``responses``, and goes out whole or as a stream through ``answer``. ``errors`` says what
every failure looks like, ``ignored`` what nobody knows, ``description`` all of it in OpenAPI.
``connection`` is what a client may do with a connection, ``body_checker`` what reads its bodies beside the event loop.
``process`` is the whole server as a process: it listens, starts the engine, and drains.
"""

from pagefold.server.app import create_app

__all__ = ["create_app"]
