"""The model that a config describes."""

import ml_collections

from refusion_jax.cli.errors import UserError
from refusion_jax.data.interface import Tokenizer
from refusion_jax.model.transformer import ModelConfig
from refusion_jax.systems.registry import find_system


def model_config(
    config: ml_collections.ConfigDict, tokenizer: Tokenizer | None = None, context: int = 0
) -> ModelConfig:
    """The shape of a run's model, and what its token ids mean.

    Args:
      config: of the run.
      tokenizer: of the run; None: ids as a tokenizer that fills the vocabulary would give them, for planning.
      context: tokens that the weights the run starts from can read; rows that are shorter take nothing from it.

    Raises:
      UserError: where the tokenizer has more ids than the embedding has rows.
    """
    rows, system = config.model.vocab_size, find_system(config.objective)
    if tokenizer and tokenizer.size > rows:
        raise UserError(
            f"--config.model.vocab_size={rows} is less than the {tokenizer.size} pieces of the tokenizer; give at "
            f"least that"
        )
    size, pad, bos, eos, mask = (
        (tokenizer.size, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id)
        if tokenizer
        else (rows, 0, 1, 2, rows - 1)
    )
    return ModelConfig(
        **config.model,
        max_position_embeddings=max(config.row_length, context),
        num_tokens=size,
        pad_token_id=pad,
        bos_token_id=bos,
        eos_token_id=eos,
        mask_token_id=mask,
        shifted=system.shifted,
        block_size=config[system.section][system.block_key] if system.block_key else 0,
    )
