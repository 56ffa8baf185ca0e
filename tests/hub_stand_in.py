"""A stand-in for the model hub on 127.0.0.1: just the requests that publishing and downloading a model make.

Repositories live in memory. A commit is a snapshot of all files, named by a hash; `main` is the last one.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SECONDS = 10
Files = dict[str, bytes]


@dataclass
class Repository:
    """The commits of one model, oldest first, and who may read it."""

    private: bool
    commits: dict[str, Files] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def files(self) -> Files:
        """Those of `main`."""
        return next(reversed(self.commits.values()), {})

    def commit(self, files: Files, message: str) -> str:
        name = hashlib.sha1(f"{len(self.commits)}{message}{sorted(files)}".encode()).hexdigest()
        self.commits[name] = {**self.files, **files}
        self.messages.append(message)
        return name


@dataclass
class Hub:
    """What the server knows, for tests to look at and to tamper with."""

    token: str
    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    """One request; the routes are those of the real hub."""

    hub: Hub
    timeout = SECONDS
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep quiet."""

    def parts(self) -> list[str]:
        return [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        match self.parts():
            case ["api", "models", owner, name, ("revision" | "tree") as asked, revision]:
                path = None
            case [owner, name, "resolve", revision, *below]:
                asked, path = None, "/".join(below)
            case _:
                return self.fail(404, "EntryNotFound")
        repository = self.hub.repositories.get(f"{owner}/{name}")
        if repository is None or (repository.private and not self.authorised()):
            return self.fail(404, "RepoNotFound")
        commit = next(reversed(repository.commits)) if revision == "main" else revision
        if commit not in repository.commits:
            return self.fail(404, "RevisionNotFound")
        files = repository.commits[commit]
        if asked == "revision":
            return self.reply({"id": f"{owner}/{name}", "sha": commit})
        if path is None:
            return self.reply([entry(path, content) for path, content in files.items()])
        if path not in files:
            return self.fail(404, "EntryNotFound")
        if self.command == "GET":
            self.hub.downloads.append(path)
        self.answer(200, files[path], {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(files[path]).hexdigest()}"'})
        return None

    def do_POST(self) -> None:
        lines = self.rfile.read(int(self.headers.get("Content-Length", 0))).splitlines()
        match self.parts():
            case ["api", "validate-yaml"]:
                self.reply({"errors": [], "warnings": []})
            case _ if not self.authorised():
                self.fail(401, "Unauthorized")
            case ["api", "repos", "create"]:
                wanted = json.loads(lines[0])
                name = f"{wanted['organization']}/{wanted['name']}"
                known = name in self.hub.repositories
                private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
                self.hub.repositories.setdefault(name, Repository(private))
                self.reply({"url": f"{self.hub.address}/{name}", "name": name}, 409 if known else 200)
            case ["api", "models", _, _, "preupload", "main"]:
                wanted = json.loads(lines[0])["files"]
                modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in wanted]
                self.reply({"files": modes})
            case ["api", "models", owner, name, "commit", "main"]:
                header, *items = (json.loads(line)["value"] for line in lines)
                files = {item["path"]: base64.b64decode(item["content"]) for item in items}
                commit = self.hub.repositories[f"{owner}/{name}"].commit(files, header["summary"])
                self.reply({"commitUrl": f"{self.hub.address}/{owner}/{name}/commit/{commit}", "commitOid": commit})
            case _:
                self.fail(404, "EntryNotFound")

    def authorised(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def reply(self, data: object, status: int = 200) -> None:
        self.answer(status, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def fail(self, status: int, code: str) -> None:
        self.answer(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@contextmanager
def running_hub(token: str) -> Iterator[Hub]:
    """A hub on a free port, stopped at the end."""
    hub = Hub(token)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join(SECONDS)
        server.server_close()
