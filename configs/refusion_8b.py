"""Adapts Qwen3 to ReFusion on query/response data, with the recipe of ReFusion's authors (arXiv 2512.13586).

--config=configs/refusion_8b.py:0.6b              or 1.7b, 4b, 8b, 14b, 32b
--config=configs/refusion_8b.py:8b,v6e:8x8        the fastest settings for one slice, by `plan`; or 8b,v6e-64

A step is 128 rows of 4,096 tokens, a run 20,000 steps. None of these models has been trained; `plan` estimates that a
step of 8B with the fastest settings takes 2.3 s on 32 v5p chips and 1.0 s on 64 v6e chips, so a run 13 and 6 hours.

Expects Qwen3's directory, as downloaded, in ./Qwen3-8B (0.6B ...) and the data in ./data/*.jsonl, unless
--config.init_from, --config.data.tokenizer and --config.data.path say otherwise.
"""

from refusion_jax.config import default_config
from refusion_jax.distributed.chips import topology_of
from refusion_jax.planning.fastest import FASTEST

# hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, tie_word_embeddings
SIZES = {
    "0.6b": (1024, 28, 16, 3072, True),
    "1.7b": (2048, 28, 16, 6144, True),
    "4b": (2560, 36, 32, 9728, True),
    "8b": (4096, 36, 32, 12288, False),
    "14b": (5120, 40, 40, 17408, False),
    "32b": (5120, 64, 64, 25600, False),
}

# Copies of the weights inside a slice, where they make the estimated step faster (`plan --search`): weights in half as
# many parts are gathered and scattered while it computes, in 64 and 128 they are not. 14B takes 4 % less time on
# v5p:4x4x4 and 11 % on v6e:8x8, 32B 7 % on v5p:4x4x8; the other sizes 1 % or less.
COPIES = {"14b": 2, "32b": 2}

# What the backward pass need not compute again, where all slices of a size have the memory: 14B takes 2 % less time
# than computing everything again (16 of v6e's 31 GiB), 32B 15 % (49 of v5p's 95).
REMAT = {"14b": "attention", "32b": "products"}

# What is fastest on one slice: `plan` estimates steps of 8B that take 7 to 23 % less time.
SLICES = {
    f"{size},{topology}": settings
    for size, shape in SIZES.items()
    for topology, settings in FASTEST.get(shape[:4], {}).items()
}

# Slices on which each size trains as it is (128 rows of 4,096 tokens per step); tests/test_tpu.py compiles them all.
TOPOLOGIES = {
    "0.6b": ["v5e:4x4"],
    "1.7b": ["v5e:4x4"],
    "4b": ["v5e:8x8", "v6e:4x4"],
    "8b": ["v5p:2x4x4", "v5e:8x8", "v6e:4x8", "v4:2x4x4"],
    "14b": ["v5p:4x4x4", "v6e:8x8"],
    "32b": ["v5p:4x4x8"],
} | {variant: [variant.partition(",")[2]] for variant in SLICES}


def get_config(variant="8b"):
    size, comma, place = variant.partition(",")
    variant = size + comma + topology_of(place)
    if variant not in (*SIZES, *SLICES):
        raise ValueError(f"unknown variant {variant!r}; known: {'; '.join([*SIZES, *SLICES])}")
    c = default_config()
    source = f"Qwen3-{size.upper()}"
    c.init_from = source
    c.data.tokenizer = f"{source}/tokenizer.json"
    c.data.mask_piece = "<|mask|>"
    c.data.thinking = "unset"  # as the authors train; their generate.py passes True, to Qwen3's template the same
    c.data.path = "data/*.jsonl"
    c.data.on_error = "skip"  # examples longer than a row
    c.row_length = 4096
    c.batch_size = 128
    c.steps = 20_000
    c.learning_rate = 2e-5
    c.final_lr_ratio = 0.0
    c.weight_decay = 0.0
    c.beta2 = 0.999
    c.dtype = "bfloat16"
    c.checkpoint.every = 500
    c.mesh.data = COPIES.get(size, 1)
    c.remat = REMAT.get(size, "full")
    hidden, layers, heads, intermediate, tied = SIZES[size]
    c.model.hidden_size = hidden
    c.model.num_hidden_layers = layers
    c.model.num_attention_heads = heads
    c.model.num_key_value_heads = 8
    c.model.head_dim = 128
    c.model.intermediate_size = intermediate
    c.model.vocab_size = 151_936
    c.model.rope_theta = 1e6
    c.model.tie_word_embeddings = tied
    c.update_from_flattened_dict(SLICES.get(variant, {}))
    return c
