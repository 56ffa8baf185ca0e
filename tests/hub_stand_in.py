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
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

MAX_BODY = 32 << 20
SECONDS = 10


@dataclass
class Repository:
    """The commits of one model, oldest first, and who may read it."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main" and self.commits:
            revision = list(self.commits)[-1]
        return (revision, self.commits[revision]) if revision in self.commits else None

    def commit(self, files: dict[str, bytes], message: str) -> str:
        seed = f"{len(self.commits)}{message}{sorted(files)}".encode()
        name = hashlib.sha1(seed).hexdigest()
        self.commits[name] = files
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

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        match parts:
            case ["api", "models", owner, name, "revision", revision]:
                found = self.find(f"{owner}/{name}", revision)
                if found:
                    self.reply({"id": f"{owner}/{name}", "sha": found[0]})
            case ["api", "models", owner, name, "tree", revision]:
                found = self.find(f"{owner}/{name}", revision)
                if found:
                    self.reply([entry(path, content) for path, content in found[1].items()])
            case [owner, name, "resolve", revision, *path]:
                self.send_file(f"{owner}/{name}", revision, "/".join(path))
            case _:
                self.fail(404, "EntryNotFound")

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        if length > MAX_BODY:
            self.fail(413, "TooLarge")
            return
        body = self.rfile.read(length)
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        match parts:
            case ["api", "validate-yaml"]:
                self.validate(json.loads(body)["content"])
            case _ if not self.authorised():
                self.fail(401, "Unauthorized")
            case ["api", "repos", "create"]:
                self.create(json.loads(body))
            case ["api", "models", owner, name, "preupload", "main"]:
                files = json.loads(body)["files"]
                modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
                self.reply({"files": modes})
            case ["api", "models", owner, name, "commit", "main"]:
                self.commit(f"{owner}/{name}", body)
            case _:
                self.fail(404, "EntryNotFound")

    def create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        known = name in self.hub.repositories
        if not known:
            private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
            self.hub.repositories[name] = Repository(private)
        self.reply({"url": f"{self.hub.address}/{name}", "name": name}, 409 if known else 200)

    def commit(self, name: str, body: bytes) -> None:
        repository = self.hub.repositories[name]
        latest = repository.files("main")
        files = dict(latest[1]) if latest else {}
        message = ""
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "header":
                message = item["value"]["summary"]
            elif item["key"] == "file":
                files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
        commit = repository.commit(files, message)
        self.reply({"commitUrl": f"{self.hub.address}/{name}/commit/{commit}", "commitOid": commit})

    def validate(self, card: str) -> None:
        """As the hub does: the front matter must be a YAML mapping."""
        _, matter, _ = card.split("---\n", 2)
        good = isinstance(yaml.safe_load(matter), dict)
        self.reply({"errors": [] if good else [{"message": "not a mapping"}], "warnings": []}, 200 if good else 400)

    def send_file(self, name: str, revision: str, path: str) -> None:
        found = self.find(name, revision)
        if not found:
            return
        commit, files = found
        if path not in files:
            self.fail(404, "EntryNotFound")
            return
        if self.command == "GET":
            self.hub.downloads.append(path)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(files[path]).hexdigest()}"'}
        self.answer(200, files[path], headers)

    def find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.authorised()):
            self.fail(404, "RepoNotFound")
            return None
        found = repository.files(revision)
        if found is None:
            self.fail(404, "RevisionNotFound")
        return found

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
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
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
