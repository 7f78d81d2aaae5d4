"""The runs of `bench headline`: every system on the same rows, with the same transformer and optimizer.

--config=configs/headline.py:tiny     a smoke test: a run takes a minute on two CPU cores, and learns little
--config=configs/headline.py:small    0.7 M parameters: 7 to 22 minutes on two CPU cores; `ar` is right on 75 to 77 %
--config=configs/headline.py:gpu      54 M parameters, for a GPU; not run yet

`--config.objective` names the system. Difficulty and training length are chosen so that `ar` of `small` is right on 70
to 95 % of the problems, which tells systems apart. Results: refusion_jax/benchmarks/results/headline.md.
"""

from refusion_jax.config import default_config

TOPOLOGIES = {"gpu": ["v5e:2x4"]}  # compiled by tests/test_tpu.py

SIZES = {
    "tiny": {
        "steps": 600,
        "batch_size": 32,
        "row_length": 64,
        "learning_rate": 4e-3,
        "data": {"path": "families", "examples": 24_000, "difficulty": 1},
        "model": {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 192,
        },
    },
    "small": {
        "steps": 1600,
        "batch_size": 32,
        "row_length": 128,
        "learning_rate": 2e-3,
        "data": {"path": "families", "examples": 160_000, "difficulty": 1},
        "model": {
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "intermediate_size": 384,
        },
    },
    "gpu": {
        "steps": 2000,
        "batch_size": 128,
        "row_length": 256,
        "learning_rate": 1e-3,
        "dtype": "bfloat16",
        "data": {"path": "families", "examples": 400_000, "difficulty": 3},
        "model": {
            "hidden_size": 640,
            "num_hidden_layers": 10,
            "num_attention_heads": 10,
            "num_key_value_heads": 10,
            "head_dim": 64,
            "intermediate_size": 1920,
        },
    },
}


def get_config(size="small"):
    if size not in SIZES:
        raise ValueError(f"unknown variant {size!r}; known: {', '.join(SIZES)}")
    c = default_config()
    c.dtype = "float32"
    c.model.vocab_size = 512
    c.update(SIZES[size])
    c.final_lr_ratio = 0.05
    c.warmup_steps = min(100, c.steps // 10)
    c.beta2 = 0.98
    c.log_every = max(1, c.steps // 40)
    c.eval.path, c.eval.rows, c.eval.every = f"{c.data.path}:held_out", 0, max(1, c.steps // 8)
    c.checkpoint.every, c.checkpoint.keep = max(1, c.steps // 4), 8
    c.mesh.data, c.mesh.fsdp = -1, 1  # the weights are small: every device holds them all
    c.model.rope_theta = 1000.0
    c.model.tie_word_embeddings = True
    # Slots and blocks no longer than the answers, which have 20 to 40 tokens.
    c.slots.sizes = (4, 8)
    c.block_diffusion.block_size = c.wedlm.block_size = c.d2f.block_length = 16
    return c
