"""A repository of the stand-in for the Hub: commits, branches, and the hashes of their files."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

_SHA = re.compile(r"[0-9a-f]{40}")


class Refused(Exception):
    """What the Hub answers instead: an HTTP status, the code it names, a message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass
class Repository:
    """Files by commit, commits by branch. `gated`: nobody has accepted its terms."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"{branch} {len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def find(self, revision: str) -> str:
        sha = revision if _SHA.fullmatch(revision) else self.branches.get(revision)
        if sha not in self.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
