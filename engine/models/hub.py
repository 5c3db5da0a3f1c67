"""Models in the Hugging Face cache of this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
"""`org/name`."""


@dataclass(frozen=True)
class CachedRepo:
    """A repository and the snapshot that its main branch last pointed at (else the newest one)."""

    repo_id: str
    snapshot: Path


def cached_models() -> list[CachedRepo]:
    """Every model repository in the cache, sorted by name. Empty without a cache."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError):
        return []
    found = []
    for repo in repos:
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))
        found.append(CachedRepo(repo.repo_id, Path(newest.snapshot_path)))
    return sorted(found, key=lambda repo: repo.repo_id.lower())


def snapshot(repo_id: str) -> Path | None:
    """The cached snapshot of `org/name`, or None when nothing of it is on this machine."""
    return next((repo.snapshot for repo in cached_models() if repo.repo_id == repo_id), None)
