"""`inspect --serve`: the page of a run, or of one of its steps, made anew from its records whenever it is asked for.

/<run> and /<run>/<step>, for a run and those beside it, to browsers on this machine alone. TensorBoard's text `worst`
links here: a browser follows no link from TensorBoard to a file.
"""
from __future__ import annotations

import html
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from sao_megatron.errors import UserError
from sao_megatron.run_folder import RunFolder

HOSTS = ("localhost", "127.0.0.1")


class PageServer(ThreadingHTTPServer):
    """`serve_forever` until told to end; a port of 0 is any free one."""

    def __init__(self, runs: Path, port: int, make_page: Callable[[Path, str | None], str]):
        """`make_page` gives the text of the page of a run's folder and a step (None: of all steps), or a UserError."""
        self.runs, self.make_page = runs, make_page
        try:
            super().__init__((HOSTS[1], port), _Handler)
        except OSError as error:
            raise UserError(f"--serve: port {port} cannot be used ({error.strerror}): end what listens there, or give "
                            f"another port (--serve {port + 1}), and tokens.page in the recipe") from None

    def address(self, run: Path) -> str:
        return f"http://{HOSTS[0]}:{self.server_address[1]}/{quote(run.name)}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in HOSTS:  # a name that somebody points at this machine
            self._answer(403, "this server answers to the name localhost alone")
            return
        name, *more = [unquote(part) for part in urlsplit(self.path).path.split("/") if part] or [""]
        try:
            if not name:
                text = _list(self.server.runs)
            elif len(more) > 1 or Path(name).name != name:
                raise UserError("the addresses here are /<run> and /<run>/<step>")
            else:
                text = self.server.make_page(self.server.runs / name, more[0] if more else None)
        except UserError as error:
            self._answer(404, str(error))
        else:
            self._answer(200, text, "text/html")

    def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


def _list(runs: Path) -> str:
    names = sorted(folder.name for folder in runs.iterdir() if RunFolder(folder).tokens_dir.is_dir())
    items = "".join(f'<li><a href="/{quote(name)}">{html.escape(name)}</a>' for name in names)
    return f"<!doctype html><meta charset=utf-8><title>runs</title><h1>{html.escape(str(runs))}</h1><ul>{items}</ul>"
