"""The part of Grafana's HTTP API that pushing boards uses, on loopback, with the answers that Grafana documents.

Grafana itself cannot be installed where these tests run. What is stood in for: folders, dashboards by uid, versions,
the conflict of a board that changed (412), tokens (401) and their rights (403).
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "glsa_editor"  # noqa: S105 - of the stand-in only
READ_ONLY = "glsa_viewer"

Json = dict[str, Any]


@dataclass
class GrafanaState:
    """What the stand-in knows: folder titles by uid, and boards with their folder by uid."""

    folders: dict[str, str] = field(default_factory=dict)
    boards: dict[str, Json] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    url: str = ""

    def answer(self, method: str, path: str, token: str, body: Json) -> tuple[int, Any]:
        """Return status and JSON body of the answer to a request."""
        if token not in (TOKEN, READ_ONLY):
            return 401, {"message": "Invalid API key", "messageId": "api-key.invalid"}
        if method == "POST" and token == READ_ONLY:
            return 403, {"message": "You'll need additional permissions to perform this action"}
        match method, path.split("?")[0].strip("/").split("/"):
            case "GET", ["api", "folders"]:
                return 200, [{"uid": uid, "title": title} for uid, title in self.folders.items()]
            case "POST", ["api", "folders"]:
                uid = body.get("uid") or f"folder{len(self.folders) + 1}"
                self.folders[uid] = body["title"]
                return 200, {"uid": uid, "title": body["title"], "version": 1}
            case "GET", ["api", "dashboards", "uid", uid]:
                if uid not in self.boards:
                    return 404, {"message": "Dashboard not found"}
                return 200, {"dashboard": self.boards[uid], "meta": {"folderUid": self.places[uid]}}
            case "POST", ["api", "dashboards", "db"]:
                return self._save(body)
        return 404, {"message": "Not found"}

    def _save(self, body: Json) -> tuple[int, Any]:
        board, uid = body["dashboard"], body["dashboard"]["uid"]
        if not board.get("title"):
            return 400, {"message": "Dashboard title cannot be empty", "status": "empty-name"}
        if body.get("folderUid") not in {*self.folders, "", None}:
            return 400, {"message": "folder not found"}
        there = self.boards.get(uid)
        if there is not None and not body.get("overwrite") and there["version"] != board.get("version"):
            return 412, {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
        version = 1 if there is None else there["version"] + 1
        self.boards[uid] = {**board, "id": len(self.boards) + 1, "version": version}
        self.places[uid] = body.get("folderUid") or ""
        return 200, {"status": "success", "uid": uid, "version": version, "url": f"/d/{uid}/board"}


@contextlib.contextmanager
def grafana_api() -> Iterator[GrafanaState]:
    """Run the stand-in for the length of a with statement."""
    state = GrafanaState()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            status, answer = state.answer(self.command, self.path, token, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _handle  # noqa: N815 - the names that http.server asks for

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
