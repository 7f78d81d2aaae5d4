"""Learning-rate schedules and the optimizer, from optax."""

import jax
import ml_collections
import optax


def make_schedule(config: ml_collections.ConfigDict) -> optax.Schedule:
    """Learning rate by step: linear warm-up, then cosine, constant, or constant and a linear decay (wsd)."""
    peak, end = config.learning_rate, config.learning_rate * config.final_lr_ratio
    warmup = optax.linear_schedule(0.0, peak, config.warmup_steps)
    rest = config.steps - config.warmup_steps
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.final_lr_ratio)
    elif config.schedule == "wsd":
        after = optax.linear_schedule(peak, end, config.decay_steps, transition_begin=rest - config.decay_steps)
    else:
        after = optax.constant_schedule(peak)
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def make_optimizer(
    config: ml_collections.ConfigDict, schedule: optax.Schedule, axes: dict
) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW; norm scales do not decay.

    Args:
      config: the run's.
      schedule: of the learning rate.
      axes: logical axis names of every weight, as a tree.
    """
    is_matrix = jax.tree.map(lambda names: "norm" not in names, axes, is_leaf=lambda x: isinstance(x, tuple))
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=is_matrix),
    )
