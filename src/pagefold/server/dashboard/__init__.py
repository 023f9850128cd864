"""The dashboard: a page that draws what the engine does, and the data that it draws."""

from pagefold.server.dashboard.routes import dashboard_routes

__all__ = ["dashboard_routes"]
