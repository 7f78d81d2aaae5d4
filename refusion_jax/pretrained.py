"""A model and its tokenizer from wherever they are: a run of ours, or a Hugging Face directory."""

from pathlib import Path
from typing import Any

import jax
from flax import nnx

from refusion_jax import checkpoints, huggingface, workdir
from refusion_jax.data.tokenizer import Tokenizer
from refusion_jax.model.transformer import ModelConfig, Transformer


def load_model(path: Path | str, dtype: str = "float32") -> Transformer:
    """Reads a trained model onto one device.

    Args:
      path: a run's directory (its newest checkpoint is taken), its checkpoints/, one step in it, or a Hugging Face
        directory of the Qwen3 family.
      dtype: of weights and computation, "float32" or "bfloat16".

    Raises:
      UserError: where no model is there, or none that we can read.
    """
    path = Path(path)
    config = read_model_config(path)
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dtype)))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=device), nnx.to_pure_dict(abstract))
    return nnx.merge(graphdef, load_params(path, target))


def read_model_config(path: Path) -> ModelConfig:
    """The shape of the model at a path; UserError where there is none."""
    if huggingface.is_huggingface(path):
        return huggingface.read_model_config(path)
    return workdir.read_model_config(checkpoints.find_step(path)[0])


def load_params(path: Path, target: dict[str, Any]) -> dict[str, Any]:
    """Weights into arrays of the target's shapes, dtypes and shardings."""
    if huggingface.is_huggingface(path):
        return huggingface.load_params(path, huggingface.read_model_config(path), target)
    return checkpoints.restore_params(checkpoints.find_step(path)[1], target)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a run, given its directory, its checkpoints/, or one step in it."""
    directory, _ = checkpoints.find_step(Path(path))
    return Tokenizer.load(directory / "tokenizer.model", workdir.read_config(directory).data.mask_piece)
