"""A model of 13 M parameters for real text.

It trains `dense`, which on worked problems is right as often as `ar`, at three to four times the tokens per forward;
its training steps compute 1.5 times the tokens of `ar`'s (refusion_jax/benchmarks/results/dense.md).

Hardware and time: a night on a laptop, minutes on a GPU or a TPU chip (estimates). Result: none is recorded yet.

--config=configs/small.py          --config.data.path='my/*.jsonl'     your own prompts and answers, or texts
--config=configs/small.py:stdlib   the source code of Python's standard library, which is always at hand
"""

from refusion_jax.config import default_config

TOPOLOGIES = {"": ["v5e:2x4"]}  # compiled by tests/test_tpu.py


def get_config(variant=""):
    c = default_config()
    c.objective = "dense"
    c.steps = 5000
    c.batch_size = 16
    c.row_length = 1024
    c.learning_rate = 1e-3
    c.warmup_steps = 100
    c.schedule = "wsd"
    c.decay_steps = 1000
    c.model.hidden_size = 384
    c.model.num_hidden_layers = 6
    c.model.num_attention_heads = 6
    c.model.num_key_value_heads = 3
    c.model.head_dim = 64
    c.model.intermediate_size = 1024
    c.model.vocab_size = 8192
    c.model.tie_word_embeddings = True
    c.checkpoint.every = 500
    if variant == "stdlib":
        c.data.path = "stdlib"
    elif variant:
        raise ValueError(f"unknown variant {variant!r}; known: stdlib")
    return c
