"""A stand-in for the Hugging Face Hub: its HTTP API on localhost, repositories in memory,
for the real client.

    with HubServer() as hub:
        run(..., env=hub.environment(tmp_path))

Ids of datasets start with `datasets/`. A commit is the whole tree of its files; branches point at
commits. Small files are sent in the commit, weights by Git LFS as the client does without Xet.
"""

from __future__ import annotations

import base64
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from card_rules import card_fault
from hub_repository import Refused, Repository, git_oid, sha256
from places import HELPERS, ROOT

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz012345"
USER = "me"
LFS = (".safetensors", ".bin", ".pt")


class HubServer:
    """Serves until its block ends, or until `stop`.

    Attributes:
        repositories: By id; tests may put in their own.
        requests: `METHOD path` of every request.
        address: What HF_ENDPOINT has to be.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.blobs: dict[str, bytes] = {}  # of Git LFS, by SHA-256
        self.stopped = threading.Event()

    def __enter__(self) -> HubServer:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        if not self.stopped.is_set():
            self.stop()

    def stop(self) -> None:
        """The port is closed afterwards: a client is refused at once.

        A client may ask for it: GET /stand-in/stop.
        """
        self._server.shutdown()
        self._server.server_close()
        self.stopped.set()

    def environment(self, home: Path, token: str | None = TOKEN, **more: str) -> dict[str, str]:
        """Of a process that uses this Hub; what it caches goes to `home`."""
        hidden = (
            "HF_HUB_OFFLINE",
            "HF_DATASETS_OFFLINE",
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "TRANSFORMERS_OFFLINE",
        )
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        kept |= {"HF_ENDPOINT": self.address, "NO_PROXY": "127.0.0.1", "HF_HOME": str(home)}
        kept |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        kept |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, HELPERS)))}
        return kept | ({} if token is None else {"HF_TOKEN": token}) | more


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub.stopped.is_set():  # a connection that was kept alive
            self.close_connection = True
            return
        self.hub.requests.append(f"{self.command} {path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = self._chunks()
        try:
            for pattern, method in _ROUTES:
                found = re.fullmatch(pattern, path)
                if found is not None:
                    method(self, **found.groupdict())
                    return
            raise Refused(404, "RepoNotFound", "Repository not found")
        except Refused as refused:
            # As a proxy might: what was sent is repeated.
            message = f"{refused.message} {self.headers.get('Authorization', '')}"
            self._send(
                refused.status, b"", {"X-Error-Code": refused.code, "X-Error-Message": message}
            )

    def _chunks(self) -> bytes:
        parts = []
        while (size := int(self.rfile.readline(), 16)) > 0:
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, content: Any, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    # Who may do what

    def _user(self) -> str | None:
        given = self.headers.get("Authorization")
        if given is None:
            return None
        if given != f"Bearer {TOKEN}":
            raise Refused(401, "", "Invalid credentials in Authorization header")
        return USER

    def _repository(self, repo: str, write: bool = False) -> Repository:
        user, found = self._user(), self.hub.repositories.get(repo)
        owner = repo.split("/")[-2] == user
        if found is None or (found.private and not owner):
            # The Hub does not tell strangers what exists.
            raise Refused(401 if user is None else 404, "RepoNotFound", "Repository not found")
        if found.gated and not write and not owner:
            raise Refused(
                403 if user else 401, "GatedRepo", "Access to this repository is restricted"
            )
        if write and user is None:
            raise Refused(401, "", "Unauthorized")
        if write and not owner:
            raise Refused(403, "", "You do not have the rights to write to this repository")
        return found

    # Answers

    def stop(self) -> None:
        self._send(200, headers={"Connection": "close"})
        threading.Thread(target=self.hub.stop).start()

    def whoami(self) -> None:
        if self._user() is None:
            raise Refused(401, "", "Unauthorized")
        self._json(
            {"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}}
        )

    def create(self) -> None:
        user, asked = self._user(), json.loads(self.body)
        if user is None:
            raise Refused(401, "", "Unauthorized")
        owner = asked.get("organization") or user
        if owner != user:
            raise Refused(
                403, "", "You don't have the rights to create a model under this namespace"
            )
        name = f"{owner}/{asked['name']}"
        content = {"url": f"{self.hub.address}/{name}", "name": name}
        if name in self.hub.repositories:
            self._json({**content, "error": "You already created this model repo"}, 409)
            return
        made = Repository(
            private=asked.get("visibility") == "private" or bool(asked.get("private"))
        )
        made.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.hub.repositories[name] = made
        self._json(content)

    def branch(self, repo: str, branch: str) -> None:
        found = self._repository(repo, write=True)
        if branch in found.branches:
            self._json({"error": "Reference already exists"}, 409)
            return
        found.branches[branch] = found.find(
            json.loads(self.body or b"{}").get("startingPoint") or "main"
        )
        self._json({})

    def info(self, repo: str, revision: str = "main") -> None:
        found = self._repository(repo)
        sha = found.find(revision)
        names = [{"rfilename": name} for name in found.commits[sha]]
        self._json(
            {
                "_id": "1",
                "id": repo,
                "modelId": repo,
                "sha": sha,
                "private": found.private,
                "siblings": names,
            }
        )

    def tree(self, repo: str, revision: str, folder: str | None) -> None:
        found = self._repository(repo)
        rows = []
        for name, content in found.commits[found.find(revision)].items():
            if name.startswith((folder or "").strip("/")):
                rows.append(
                    {"type": "file", "path": name, "size": len(content), "oid": git_oid(content)}
                )
                if name.endswith(LFS):
                    rows[-1]["lfs"] = {
                        "oid": sha256(content),
                        "size": len(content),
                        "pointerSize": 130,
                    }
        if folder and not rows:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist")
        self._json(rows)

    def preupload(self, repo: str, revision: str) -> None:
        found = self._repository(repo, write=True)
        there = found.commits[found.find(revision)]
        files = []
        for file in json.loads(self.body)["files"]:
            large, content = file["path"].endswith(LFS), there.get(file["path"])
            oid = None if content is None else sha256(content) if large else git_oid(content)
            mode = "lfs" if large else "regular"
            files.append(
                {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}
            )
        self._json({"files": files})

    def lfs_batch(self, repo: str) -> None:
        self._repository(repo, write=True)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            actions = {
                "upload": {"href": f"{self.hub.address}/lfs/{wanted['oid']}"},
                "verify": {"href": f"{self.hub.address}/{repo}.git/info/lfs/verify"},
            }
            objects.append(
                {**wanted, **({} if wanted["oid"] in self.hub.blobs else {"actions": actions})}
            )
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str) -> None:
        if sha256(self.body) != oid:
            raise Refused(400, "", "the content does not have this hash")
        self.hub.blobs[oid] = self.body
        self._send(200)

    def lfs_verify(self, repo: str) -> None:
        self._repository(repo, write=True)
        asked = json.loads(self.body)
        if len(self.hub.blobs.get(asked["oid"], b"")) != asked["size"]:
            raise Refused(404, "", "no such object")
        self._json({})

    def commit(self, repo: str, revision: str) -> None:
        found = self._repository(repo, write=True)
        files = dict(found.commits[found.find(revision)])
        for line in self.body.splitlines():
            part = json.loads(line)
            value = part["value"]
            if part["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif part["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif part["key"] == "deletedFile":
                del files[value["path"]]
        fault = card_fault(files.get("README.md", b"").decode())
        if fault is not None:
            raise Refused(400, "", f"README.md: {fault}")
        sha = found.commit(revision, files)
        url = f"{self.hub.address}/{repo}/commit/{sha}"
        self._json({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    def resolve(self, repo: str, revision: str, name: str) -> None:
        found = self._repository(repo)
        sha = found.find(revision)
        content = found.commits[sha].get(name)
        if content is None:
            message = {
                "X-Repo-Commit": sha,
                "X-Error-Code": "EntryNotFound",
                "X-Error-Message": "Entry not found",
            }
            self._send(404, b"", message)
            return
        etag = sha256(content) if name.endswith(LFS) else git_oid(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Content-Length": str(len(content))}
        self._send(200, content, headers)

    def validate(self) -> None:
        fault = card_fault(json.loads(self.body)["content"])
        self._json({"errors": [] if fault is None else [fault]}, 200 if fault is None else 400)


_REPO = r"(?P<repo>(?:datasets/)?[^/]+/[^/]+)"
_API = rf"/api/(?:models/)?{_REPO}"
_ROUTES = [
    (r"/stand-in/stop", _Handler.stop),
    (r"/api/whoami-v2", _Handler.whoami),
    (r"/api/repos/create", _Handler.create),
    (r"/api/validate-yaml", _Handler.validate),
    (rf"{_API}/branch/(?P<branch>.+)", _Handler.branch),
    (rf"{_API}/preupload/(?P<revision>.+)", _Handler.preupload),
    (rf"{_API}/commit/(?P<revision>.+)", _Handler.commit),
    (rf"{_API}/revision/(?P<revision>.+)", _Handler.info),
    (rf"{_API}/tree/(?P<revision>[^/]+)(?P<folder>/.+)?", _Handler.tree),
    (_API, _Handler.info),
    (rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (rf"/{_REPO}\.git/info/lfs/verify", _Handler.lfs_verify),
    (r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.lfs_put),
    (rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
]
