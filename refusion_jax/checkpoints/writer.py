"""Orbax checkpointers that write checksums of all files before the checkpoint gets its final name, and fail quietly."""

import functools
import inspect
import logging
import math
import sys
import traceback
import warnings
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from etils import epath

from refusion_jax.checkpoints import checksums
from refusion_jax.checkpoints.run_directory import TEMPORARY

_LATE = "_CHECKPOINT_METADATA"  # Orbax adds the time of the commit to this file after `finalize`
# On a full disk, threads of a save, and the process with them, wait up to 300 s for directories that cannot be created.
_AT_ONCE = ocp.options.AsyncOptions(create_directories_asynchronously=False)
_IN_FLIGHT = 0.05  # share of a host's part of the state that each item may have on its way to storage
_OF_ORBAX = (
    "(.*serialize.*|.*CheckpointHandler.*|_create_paths|cancellable)"  # coroutines left by a save on a full disk
)


def make_checkpointer(state: Any) -> ocp.AsyncCheckpointer:
    """A checkpointer for `Items`, saving in the background.

    A save holds the copy that was taken off the devices, and what is being written if that has another form: if it is
    compressed, or has its axes in another order on the device. So arrays are not compressed: compression makes weights
    7 % smaller, costs two thirds of a save's CPU time, and the buffers of all its threads came to 0.4 of the state. For
    arrays in another order, the amount on its way to storage is limited.
    """
    arrays = jax.tree.leaves(state)
    own = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays) / jax.process_count()
    largest = max(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)
    handler = _WithChecksums(max(_IN_FLIGHT * own, 1.01 * largest + 1))
    return ocp.AsyncCheckpointer(handler, async_options=_AT_ONCE)


class _WithChecksums(ocp.CompositeCheckpointHandler):
    """Each host lists the checksums of the files that it has written."""

    def __init__(self, in_flight: float):
        limit = in_flight / 1e9
        arrays = (ocp.PyTreeCheckpointHandler(save_concurrent_gb=limit, use_compression=False) for _ in range(2))
        super().__init__(
            composite_options=ocp.CompositeOptions(async_options=_AT_ONCE),
            params=next(arrays),
            optimizer=next(arrays),
            data=ocp.JsonCheckpointHandler(),
        )

    async def async_save(self, directory: epath.Path, args: ocp.args.Composite) -> list:
        """Begins to save; hosts other than the first list their files once these are written."""
        futures = await super().async_save(directory, args)
        return [*futures, _OwnChecksums(directory)] if jax.process_index() else futures

    def finalize(self, directory: epath.Path) -> None:
        """Called on the first host when all have written: lists the files that no other host has listed."""
        super().finalize(directory)
        checksums.write_unlisted(directory, but=_LATE)


@ocp.args.register_with_handler(_WithChecksums, for_save=True, for_restore=True)
class Items(ocp.args.Composite):
    """The items of a checkpoint; a separate class, because Orbax finds the handler by the class of its arguments."""


def restoring(target: Any) -> ocp.args.PyTreeRestore:
    """The argument that restores an item into these shardings; shapes and dtypes must be those it has."""
    return ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))


class _OwnChecksums:
    """A future that Orbax waits for, in the background, after this host's own writes."""

    def __init__(self, directory: epath.Path):
        self._directory = directory

    def result(self, timeout: float | None = None) -> None:
        """Lists this host's files under their final names."""
        files = {}
        for item in self._directory.iterdir():
            own = item / f"ocdbt.process_{jax.process_index()}"
            for path in checksums.files_below(own) if own.is_dir() else ():
                files[f"{item.name.partition(TEMPORARY)[0]}/{path.relative_to(item)}"] = path
        checksums.write(self._directory, files)

    def cancel(self) -> None:
        """There is nothing to cancel."""


@functools.cache
def silence_orbax_tracebacks() -> None:
    """Suppresses the tracebacks of failed saves.

    Orbax logs one itself. Every other write in progress prints another one: for tasks or coroutines that were never
    awaited, or wait for a lock, when they are garbage-collected, or after their event loop has ended.
    """
    absl_logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname or not record.exc_info)
    logging.getLogger("asyncio").addFilter(lambda record: not _is_of_orbax(record.exc_info))
    warnings.filterwarnings("ignore", f"coroutine '{_OF_ORBAX}' was never awaited", RuntimeWarning)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed" and not inspect.iscoroutine(unraisable.object):
            before(unraisable)

    sys.unraisablehook = hook


def _is_of_orbax(exc_info: Any) -> bool:
    if not exc_info:
        return False
    if any(name in str(exc_info[1]) for name in ("tensorstore", "OCDBT")):  # their futures have no frames
        return True
    names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(exc_info[2]))
    return any(name.partition(".")[0] == "orbax" for name in names)
