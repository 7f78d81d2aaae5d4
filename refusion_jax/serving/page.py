"""The page of the server, for people: it talks to the routes that every client has, and loads nothing else."""

from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse

_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def page(request: Request) -> HTMLResponse:
    """Without a key, as it holds no data."""
    html = resources.files("refusion_jax.serving").joinpath("page.html").read_text("utf-8")
    return HTMLResponse(html, headers={"Content-Security-Policy": _POLICY})
