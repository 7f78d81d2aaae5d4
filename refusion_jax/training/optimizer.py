"""Learning-rate schedules and the optimizer, from optax."""

from collections.abc import Callable

import jax
import ml_collections
import optax
import optax.contrib


def make_schedule(config: ml_collections.ConfigDict) -> optax.Schedule:
    """Learning rate by step: linear warm-up, then cosine, constant, or constant and a linear decay (wsd)."""
    peak, end = config.learning_rate, config.learning_rate * config.final_lr_ratio
    warmup = optax.linear_schedule(0.0, peak, config.warmup_steps)
    rest = config.steps - config.warmup_steps
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, max(rest, 1), alpha=config.final_lr_ratio)
    elif config.schedule == "wsd":
        after = optax.linear_schedule(peak, end, config.decay_steps, transition_begin=rest - config.decay_steps)
    else:
        after = optax.constant_schedule(peak)
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def make_optimizer(
    config: ml_collections.ConfigDict, schedule: optax.Schedule, axes: dict
) -> optax.GradientTransformation:
    """Clips by global norm, then applies the optimizer of the config, without weight decay of norm scales and biases.

    adamw      two moments of every weight (arXiv 1711.05101)
    adafactor  only row and column means of the second moment of a matrix (arXiv 1804.04235)
    muon       one moment; updates of matrices in layers are orthogonalized, and scaled so that learning rates of AdamW
               can be used (arXiv 2502.16982); embedding, output head, norms, and of an adapter the side away from the
               residual stream use AdamW, with Nesterov's momentum, as in optax

    `axes` are the logical axis names of every weight, as a tree.
    """
    is_matrix = _map_axes(lambda names: not {"norm", "bias"} & set(names), axes)
    decay, dtype = config.weight_decay, config.moment_dtype
    if config.optimizer == "adamw":
        update = optax.adamw(schedule, config.beta1, config.beta2, weight_decay=decay, mask=is_matrix, mu_dtype=dtype)
    elif config.optimizer == "adafactor":
        update = optax.chain(
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(decay, is_matrix),
            optax.scale_by_learning_rate(schedule),
        )
    else:
        direction = optax.contrib.muon(
            -1.0,  # in place of a learning rate, whose negative it multiplies by; the schedule follows below
            mu_dtype=dtype,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=_map_axes(_as_matrix, axes),
            consistent_rms=0.2,
        )
        # optax.contrib.muon has no mask for the weight decay of weights that use AdamW.
        decayed = optax.add_decayed_weights(decay, is_matrix)
        update = optax.chain(direction, decayed, optax.scale_by_learning_rate(schedule))
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)


def _map_axes(function: Callable, axes: dict) -> dict:
    return jax.tree.map(function, axes, is_leaf=lambda x: isinstance(x, tuple))


def _as_matrix(names: tuple[str, ...]) -> optax.contrib.MuonDimensionNumbers | None:
    """Input and output axes of a stacked layer weight; None for weights that are not matrices of layers."""
    embed = next((i for i, name in enumerate(names) if name in ("embed", "expert_embed")), None)
    if names[0] != "layers" or embed is None:
        return None
    others = tuple(i for i, name in enumerate(names) if name not in ("layers", "experts") and i != embed)
    return optax.contrib.MuonDimensionNumbers(*(((embed,), others) if embed < others[0] else (others, (embed,))))
