"""Data sets of the Hugging Face Hub, read where they are: hf://datasets/ORG/NAME[@REVISION][/FILES]."""

from refusion_jax.cli.errors import UserError, first_line, needs

PREFIX = "hf://datasets/"


def pinned(pattern: str) -> str:
    """The pattern at the commit that the revision, or main, is now, so that its files stay the same."""
    if not pattern.startswith(PREFIX):
        return pattern
    with needs("hub"):
        from huggingface_hub import HfApi
    name, _, files = pattern.removeprefix(PREFIX).partition("@")
    owner, repository, *path = (*name.split("/", 2), "", "")
    if not repository or (files and any(path)):
        raise UserError(f"--input={pattern}: must be {PREFIX}ORG/NAME[@REVISION][/FILES]")
    path = files.split("/", 1)[1:] if files else path[:1]
    revision = files.split("/", 1)[0].replace("%2F", "/") if files else None
    try:
        commit = HfApi().dataset_info(f"{owner}/{repository}", revision=revision).sha
    except Exception as error:  # noqa: BLE001  of the Hub, of the network, of a name that is none
        raise UserError(f"--input={pattern}: {first_line(error)}") from error
    return "/".join([f"{PREFIX}{owner}/{repository}@{commit}", *path])
