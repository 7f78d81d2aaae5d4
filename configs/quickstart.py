"""The quickstart: a model of 0.7 million parameters learns worked problems from scratch, in minutes on two CPU cores.

Hardware: two virtual AMD EPYC cores. Time: 168 to 487 s for 2,400 steps (jax 0.10.2). Result: 200 of 200 held-out
problems solved, at 4.3 to 4.4 tokens per forward (refusion_jax/benchmarks/results/quickstart.md).

--config=configs/quickstart.py            slot diffusion
--config=configs/quickstart.py:llada      another system, by name, with keys that suit answers of 25 tokens
"""

from refusion_jax.config import default_config

TOPOLOGIES = {"": ["v5e:2x2"]}  # compiled by tests/test_tpu.py


OWN_KEYS = {"block_diffusion": {"block_diffusion.block_size": 8}, "wedlm": {"wedlm.block_size": 16}}


def get_config(variant=""):
    c = default_config()
    if variant:
        c.objective = variant
        c.update_from_flattened_dict(OWN_KEYS.get(variant, {}))
    c.steps = 2400
    c.batch_size = 32
    c.row_length = 64
    c.learning_rate = 2e-3
    c.final_lr_ratio = 0.05
    c.warmup_steps = 100
    c.beta2 = 0.98
    c.log_every = 100
    c.mesh.data = -1  # the weights are small: every device holds them all
    c.mesh.fsdp = 1
    c.model.hidden_size = 128
    c.model.num_hidden_layers = 3
    c.model.num_attention_heads = 4
    c.model.num_key_value_heads = 4
    c.model.head_dim = 32
    c.model.intermediate_size = 384
    c.model.vocab_size = 512
    c.model.rope_theta = 1000.0
    c.model.tie_word_embeddings = True
    c.slots.sizes = (4, 8)
    c.checkpoint.every = 600
    return c
