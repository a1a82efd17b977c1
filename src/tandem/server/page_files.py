"""The page at `/`: static files without a build step, which load nothing from other sites."""

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import FastAPI
from fastapi.responses import Response

_SCRIPTS = ("page", "chat", "chats", "calls", "markdown", "pictures", "state", "live",
            "connection", "elements")  # fmt: skip
PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in _SCRIPTS},
}
"""(file, media type) by URL path."""

# No other site may show the page in a frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Add the page's routes; the API's description omits them."""
    for path, (file, kind) in PAGE_FILES.items():
        app.add_api_route(path, _page(file, kind), include_in_schema=False)


def _page(file: str, kind: str) -> Callable[[], Awaitable[Response]]:
    text = (resources.files("tandem.server") / "page" / file).read_bytes()

    async def page() -> Response:
        return Response(text, media_type=kind, headers=_HEADERS)

    return page
