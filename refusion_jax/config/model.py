"""The model that a config describes, the one that it starts from, and the one that it reads, its target model."""

import dataclasses
import math
from collections.abc import Sequence

import ml_collections
from etils import epath

from refusion_jax.checkpoints.contents import choose_method, find_tokenizer, locate, read_model_config
from refusion_jax.cli.errors import SettingError, UserError, naming
from refusion_jax.config import check_steps, default_config, make_objective
from refusion_jax.config.keys import keys
from refusion_jax.config.run_config import read_config
from refusion_jax.data.fast_tokenizer import first_difference
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.tokenizer import MASK_PIECE
from refusion_jax.distributed.storage import absolute
from refusion_jax.model.shape import OPTIONAL, ModelConfig
from refusion_jax.systems.registry import find_system

# Keys of config.model for its size; `vocab_size` may exceed that of the weights to start from.
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "intermediate_size",
)


def adopt_shape(config: ml_collections.ConfigDict, workdir: epath.Path | None = None) -> None:
    """Sets the keys of config.model that have their default values to those of the model that a run starts from.

    The same goes for data.mask_piece, if that model has a mask token. Without init_from all stay as they are. If the
    run has already begun in `workdir`, its own config counts, since its source may be gone, and so do its steps
    computed from epochs; from other epochs they follow only once the rows are known. A config with another shape is
    refused. For planning, without `workdir`, the source of a config that has a shape of its own need not be there.

    With adapters, a run in init_from becomes its step that is the newest when they begin: others may follow.
    """
    began = read_config(workdir) if workdir and (workdir / "config.json").exists() else None
    if config.epochs:
        config.steps = began.steps if began and config.epochs == began.epochs else keys()["steps"].at_most
    if not config.init_from:
        return
    source = epath.Path(config.init_from)
    if not began and not source.is_dir():
        if not workdir and dict(config.model) != dict(default_config().model):
            return
        raise UserError(f"--config.init_from={source} is not a directory")
    with naming("--config.init_from"):
        there = began.model if began else dataclasses.asdict(read_model_config(source))
        own = None if began else find_tokenizer(source)
        if config.lora.rank and not began:
            config.init_from = str(locate(source).path)
    if config.lora.rank and began and epath.Path(began.init_from).is_relative_to(absolute(config.init_from)):
        config.init_from = began.init_from
    if config.data.mask_piece == MASK_PIECE and (began or (own and not own.adds_mask)):
        config.data.mask_piece = began.data.mask_piece if began else own.name_of(own.mask_id)
    for name, default in default_config().model.items():
        if config.model[name] == default:
            config.model[name] = there[name]
    others = [name for name in SIZES if config.model[name] != there[name]]
    if others and not began:
        name, *rest = others
        raise UserError(
            f"--config.model.{name}={config.model[name]}: {source} has {there[name]}"
            f"{', and other values of ' + ', '.join(rest) if rest else ''}; a config file that sets no keys of model "
            f"takes all from there"
        )


def find_target_model(config: ml_collections.ConfigDict) -> tuple[str, epath.Path | None]:
    """(key, path) of the target model, whose hidden states the trained one reads; None if the objective has none.

    UserError if it must have one and none is named, or if no decoder could use the trained model along with it.
    """
    system, path = find_system(config.objective), make_objective(config, 0).reads
    key = f"{system.section}.reads"
    if "reads" in system.keys and not path:
        raise SettingError("config", key, "", "name the run or model that is read")
    if path and system.decodes and system.decoders:
        with naming(f"--config.{key}"):
            choose_method(epath.Path(path), min(system.decoders))
    return key, epath.Path(path) if path else None


def adopt_steps(config: ml_collections.ConfigDict, rows: int) -> None:
    """Sets config.steps from config.epochs, if set, and the number of rows; the steps must fit the schedule."""
    if config.epochs:
        config.steps = max(1, math.ceil(config.epochs * rows / config.batch_size))
        check_steps(config)


def model_config(
    config: ml_collections.ConfigDict, tokenizer: Tokenizer | None = None, context: int = 0
) -> ModelConfig:
    """The shape of a run's model, and what its token ids mean; the embedding must have a row for each of them.

    Without a tokenizer, for planning, it assumes one that fills the vocabulary. `context` is the number of tokens that
    the initial weights can read; shorter rows do not reduce it.
    """
    rows, system = config.model.vocab_size, find_system(config.objective)
    if tokenizer and tokenizer.size > rows:
        raise UserError(
            f"--config.model.vocab_size={rows} is less than the {tokenizer.size} pieces of the tokenizer; give at "
            f"least that"
        )
    ids = {"pad": 0, "bos": 1, "eos": 2, "mask": rows - 1}
    if tokenizer:
        ids = {name: getattr(tokenizer, f"{name}_id") for name in ids}
    return ModelConfig(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in config.model.items()},
        **{f"{name}_token_id": token for name, token in ids.items()},
        max_position_embeddings=max(config.row_length, context),
        num_tokens=tokenizer.size if tokenizer else rows,
        shifted=system.objective.shifted,
        block_size=config[system.section][system.block_key] if system.block_key else 0,
    )


def check_fits(
    path: epath.Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    flag: str = "config.init_from",
    alike: Sequence[str] = (),
) -> None:
    """Refuses weights of a model of another shape, or whose token ids have other meanings.

    `config` is that of the model to be initialized, `tokenizer` that of the data; `flag` names the path.
    Compares the keys in `alike`, by default all keys on which weights depend.
    """
    there, own = read_model_config(path), find_tokenizer(path)
    if own and (token := first_difference(own, tokenizer)) is not None:
        raise UserError(
            f"--{flag}={path}: its tokenizer is another one than that of the data (token {token} is "
            f"{own.decode([token])!r} there, {tokenizer.decode([token])!r} here); name it with "
            f"--config.data.tokenizer, and prepare data with it"
        )
    others = ["rope_theta", "rope_scaling", "local_rope", *(key for key in OPTIONAL if key != "router_aux_loss_coef")]
    for key in alike or [*SIZES, *others, "rms_norm_eps", "tie_word_embeddings", "family"]:
        if getattr(there, key) != getattr(config, key):
            raise UserError(f"--config.model.{key}={getattr(config, key)}: {path} has {getattr(there, key)}")
    if alike:
        return
    if there.local_rope and there.max_position_embeddings < config.max_position_embeddings:
        window = there.max_position_embeddings
        raise UserError(f"--config.row_length must be at most {window}, to which local layers of {path} attend")
    is_padded = not locate(path).step and there.vocab_size < config.vocab_size
    if there.vocab_size != config.vocab_size and not is_padded:
        raise UserError(f"--config.model.vocab_size={config.vocab_size}: {path} has {there.vocab_size}")
