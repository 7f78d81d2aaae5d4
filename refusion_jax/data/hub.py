"""Data sets of the Hugging Face Hub, read remotely: hf://datasets/ORG/NAME[@REVISION][/FILES]."""

from refusion_jax.cli.errors import UserError, first_line, needs

PREFIX = "hf://datasets/"


def pinned(pattern: str, flag: str = "--input") -> str:
    """The pattern, given by a flag, pinned to the current commit of its revision (default: main)."""
    if not pattern.startswith("hf://"):
        return pattern
    if not pattern.startswith(PREFIX):
        raise UserError(f"{flag}={pattern}: is not a data set; those are {PREFIX}ORG/NAME")
    with needs("hub"):
        from huggingface_hub import HfApi, HfFileSystem
    try:
        found = HfFileSystem().resolve_path(pattern)
        commit = HfApi().dataset_info(found.repo_id, revision=found.revision).sha
    except Exception as error:  # noqa: BLE001  from the Hub, the network, or for an invalid name
        raise UserError(f"{flag}={pattern}: {first_line(error)}") from error
    return "/".join(filter(None, [f"{PREFIX}{found.repo_id}@{commit}", found.path_in_repo]))
