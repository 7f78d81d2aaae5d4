"""What the text of a path tells: whether it lies in an object store (gs://...), and in which."""

import os

from etils import epath

STORES = ("gs://", "s3://", "az://", "hf://")  # that etils knows


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path lies in an object store."""
    return "://" in os.fspath(path)


def is_text(path: epath.PathLike) -> bool:
    """Whether a path, from the root, is UTF-8; any other cannot be given to libraries in C++."""
    return is_remote(path) or not any("\udc80" <= c <= "\udcff" for c in os.path.abspath(path))


def names_no_store(text: str) -> str:
    """What is wrong with a path, or paths between commas, neither local nor in a known store; "" for nothing."""
    elsewhere = [path for path in map(str.strip, text.split(",")) if not path.startswith(STORES)]
    if any("://" in path for path in elsewhere):
        return f"names no store that we know before ://, which are {', '.join(name[:-3] for name in STORES)}"
    if store := next((name for name in STORES for path in elsewhere if path.startswith(name[:-1])), ""):
        return f"a store begins with {store}"
    return ""
