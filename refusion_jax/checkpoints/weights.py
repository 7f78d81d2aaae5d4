"""Model weights without the rest of the train state: read from a run's checkpoints, or written as one."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from refusion_jax.checkpoints.run_directory import check_whole, find_step
from refusion_jax.checkpoints.writer import Items, make_checkpointer, silence_orbax_tracebacks
from refusion_jax.cli.errors import UserError, refusing
from refusion_jax.distributed.storage import absolute
from refusion_jax.model.huggingface import is_finite

# (path of a weight in the tree, entries of its first axis) -> these entries, in any dtype
Reader = Callable[[tuple[str, ...], slice], np.ndarray]


def restore_params(path: epath.Path, target: Any) -> Any:
    """Weights of the newest step, or of the step in the path, with the shapes, dtypes and shardings of a target."""
    silence_orbax_tracebacks()
    directory = _find_params(path, target)
    with refusing(f"{directory} cannot be read"), ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(directory, target)  # may raise anything, at damage that no checksum has shown
    return checked(directory, restored)


def checked(place: epath.Path, params: Any) -> Any:
    """Returns the weights unchanged; UserError, naming their place, if one is infinite or not a number."""
    for path, weight in jax.tree.leaves_with_path(params):
        if not is_finite(weight):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise UserError(f"{place}: {name} holds values that are not finite as {weight.dtype}")
    return params


def open_params(path: epath.Path, target: Any) -> Reader:
    """A reader of the weights of the newest step, or of the step in the path, one part of a weight at a time.

    Memory is taken by the stored chunks that hold the part: by a whole weight, if one device wrote it.
    The path is as for `find_step`; `target` has the shapes.
    """
    directory, context = _find_params(path, target), ocp.type_handlers.get_ts_context(use_ocdbt=True)

    def read(name: tuple[str, ...], part: slice) -> np.ndarray:
        info = ocp.type_handlers.ParamInfo(
            name=".".join(name), parent_dir=directory, is_ocdbt_checkpoint=True, ts_context=context
        )
        spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=True)
        found = tensorstore.open(spec, open=True, read=True, context=context).result()[part].read().result()
        return checked(directory, {info.name: found})[info.name]

    return read


def stored_dtype(path: epath.Path) -> str:
    """The dtype of the weights of the newest step, or of the step in the path: "float32" or "bfloat16"."""
    return "bfloat16" if {str(x.dtype) for x in jax.tree.leaves(_stored(path))} == {"bfloat16"} else "float32"


def save_params(workdir: epath.Path, params: Any) -> None:
    """Writes weights as step 0 of a run directory; models are loaded from it, but no training resumes from it."""
    silence_orbax_tracebacks()
    checkpointer = make_checkpointer(params)
    target = absolute(workdir) / "checkpoints" / "0"
    checkpointer.save(target, args=Items(params=ocp.args.PyTreeSave(params)))
    checkpointer.close()


def _find_params(path: epath.Path, target: Any) -> epath.Path:
    """The directory of the weights; refuses damaged weights, and those with other shapes than the target."""
    there, (workdir, step) = _stored(path), find_step(path)
    found, wanted = (
        {jax.tree_util.keystr(path): tuple(x.shape) for path, x in jax.tree.leaves_with_path(tree)}
        for tree in (there, target)
    )
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            misfit = f"{name} has shape {found.get(name, 'none')} instead of {wanted.get(name, 'none')}"
            raise UserError(f"{step}: {misfit}: this is not the model that {workdir / 'model.json'} describes")
    return step / "params"


def _stored(path: epath.Path) -> Any:
    """The metadata of the stored weights; refuses damaged ones."""
    step = find_step(path)[1]
    hint = f"name another step in {step.parent}, if there is one"
    with refusing(f"{path}: checkpoint {step.name} cannot be read ({hint})"):
        check_whole(step, ("params",))
        return ocp.StandardCheckpointHandler().metadata(step / "params")
