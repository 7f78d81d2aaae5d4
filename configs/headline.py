"""The runs of `bench headline`: every system on the same rows, with the same transformer and optimizer.

--config=configs/headline.py:tiny     a smoke test: a run takes a minute on two CPU cores
--config=configs/headline.py:small    a model of 0.7 million parameters: a run takes 4 to 17 minutes
--config=configs/headline.py:gpu      one of 54 M parameters, for a GPU
--config=configs/headline.py:gpu_text the same on text, the source code of Python's standard library

`--config.objective` names the system. Difficulty and length are such that the left-to-right model of `small` stands
between 70 and 95 %: where everybody is right, nobody is better.
"""

from refusion_jax.config import default_config

TOPOLOGIES = {"gpu": ["v5e:2x4"]}  # compiled by tests/test_tpu.py

# hidden size, layers, heads, head size, mlp size; steps, rows a step, tokens a row; problems, difficulty; rate
# The text has 3 M tokens, which are seen five times.
SIZES = {
    "tiny": ((64, 2, 2, 32, 192), (600, 32, 64), (24_000, 1), 4e-3),
    "small": ((128, 3, 4, 32, 384), (1600, 32, 128), (160_000, 1), 2e-3),
    "gpu": ((640, 10, 10, 64, 1920), (2000, 128, 256), (400_000, 3), 1e-3),
    "gpu_text": ((640, 10, 10, 64, 1920), (500, 64, 512), (0, 0), 1e-3),
}


def get_config(size="small"):
    if size not in SIZES:
        raise ValueError(f"unknown variant {size!r}; known: {', '.join(SIZES)}")
    (hidden, layers, heads, head, mlp), (steps, rows, length), (problems, difficulty), rate = SIZES[size]
    c = default_config()
    c.steps, c.batch_size, c.row_length, c.learning_rate = steps, rows, length, rate
    c.final_lr_ratio = 0.05
    c.warmup_steps = min(100, steps // 10)
    c.beta2 = 0.98
    c.log_every = max(1, steps // 40)
    if problems:
        c.data.path, c.data.examples, c.data.difficulty = "families", problems, difficulty
    else:
        c.data.path = "stdlib"
    c.eval.path, c.eval.rows, c.eval.every = f"{c.data.path}:held_out", 0, max(1, steps // 8)
    c.checkpoint.every, c.checkpoint.keep = max(1, steps // 4), 8
    c.mesh.data, c.mesh.fsdp = -1, 1  # the weights are small: every device holds them all
    c.model.hidden_size, c.model.num_hidden_layers, c.model.intermediate_size = hidden, layers, mlp
    c.model.num_attention_heads = c.model.num_key_value_heads = heads
    c.model.head_dim = head
    c.model.vocab_size = 512 if problems else 4096
    c.model.rope_theta = 1000.0
    c.model.tie_word_embeddings = True
    c.dtype = "bfloat16" if size.startswith("gpu") else "float32"
    # Pieces and blocks no longer than the answers, which have 20 to 40 tokens.
    c.slots.sizes = (4, 8)
    c.block_diffusion.block_size = c.wedlm.block_size = c.d2f.block_length = 16
    return c
