"""What the text of a path says: whether it is in an object store (gs://...), and in which one."""

import os

from etils import epath

STORES = ("gs://", "s3://", "az://", "hf://")  # known to etils


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path is in an object store."""
    return "://" in os.fspath(path)


def names_no_store(text: str) -> str:
    """What is wrong with a path, or comma-separated paths, neither local nor in a known store; "" if nothing is."""
    elsewhere = [path for path in map(str.strip, text.split(",")) if not path.startswith(STORES)]
    if any("://" in path for path in elsewhere):
        return f"names no store that we know before ://, which are {', '.join(name[:-3] for name in STORES)}"
    if store := next((name for name in STORES for path in elsewhere if path.startswith(name[:-1])), ""):
        return f"a store begins with {store}"
    return ""
