"""The configuration: every key with its default and meaning, and the checks made when it is parsed.

A file in configs/ starts from `default_config()` and changes what it needs; flags change the rest
(`--config.learning_rate=1e-3`). `check` refuses impossible values before anything is built or written.
"""

import jax
import ml_collections

from refusion_jax.runtime import sharding
from refusion_jax.runtime.errors import UserError


def default_config() -> ml_collections.ConfigDict:
    """All keys. The comment behind a key is its help text."""
    c = ml_collections.ConfigDict()
    c.seed = 0  # of the weights, the order of the rows and the noise: all randomness follows from it
    c.steps = 1000  # optimizer steps
    c.batch_size = 32  # rows a step, over all chips
    c.row_length = 1024  # tokens a row; documents are packed into rows
    c.init_from = ""  # weights to start from: a Hugging Face directory, a converted one or a run; empty: random
    c.objective = "refusion"  # refusion: slot diffusion | ar: plain next token, the left-to-right baseline
    c.learning_rate = 3e-4  # peak
    c.schedule = "cosine"  # cosine | wsd (warmup, stable, decay) | constant
    c.warmup_steps = 0  # linear warm-up from 0
    c.decay_steps = 0  # length of the final linear decay of wsd
    c.final_lr_ratio = 0.1  # learning rate at the end over its peak (cosine, wsd)
    c.optimizer = "adamw"  # adamw | adafactor (moments of rows and columns only) | muon (one moment a weight)
    c.moment_dtype = "float32"  # of the first moment, float32 | bfloat16
    c.weight_decay = 0.1  # on matrices only
    c.beta1 = 0.9  # of AdamW
    c.beta2 = 0.95  # of AdamW
    c.clip_norm = 1.0  # gradients are scaled down to this global norm
    c.accumulation = 1  # micro-batches a step: less memory, same result
    c.remat = "none"  # what the backward pass computes again: none | outputs (keeps attention and mlp) | full | offload
    c.dtype = "float32"  # of computation, float32 | bfloat16; weights, softmax and loss are float32 always
    c.log_every = 10  # steps between metrics
    c.profile_steps = ()  # first and last step to profile, such as (10,12); TensorBoard shows it

    c.mesh = ml_collections.ConfigDict()
    c.mesh.replica = 1  # copies of the whole over the data-centre network
    c.mesh.data = 1  # copies of the weights inside a slice
    c.mesh.fsdp = -1  # weights and batch split over these chips; -1 takes all that are left
    c.mesh.tensor = 1  # heads, mlp and vocabulary split over these chips
    c.mesh.sequence = 1  # rows split over these chips

    c.model = ml_collections.ConfigDict()
    c.model.hidden_size = 256  # width of the residual stream
    c.model.num_hidden_layers = 4  # depth
    c.model.num_attention_heads = 4  # query heads
    c.model.num_key_value_heads = 2  # key/value heads; divides num_attention_heads
    c.model.head_dim = 64  # size of a head
    c.model.intermediate_size = 768  # width of the SwiGLU
    c.model.vocab_size = 4096  # rows of the embedding; at least the tokenizer's vocabulary
    c.model.rope_theta = 1e4  # base of the rotary frequencies
    c.model.rms_norm_eps = 1e-6  # in every RMSNorm
    c.model.tie_word_embeddings = False  # one matrix for embedding and output head

    c.slots = ml_collections.ConfigDict()
    c.slots.sizes = (4, 8, 16, 32)  # slot sizes, drawn uniformly per document
    c.slots.eps = 1e-3  # least probability of masking a slot
    c.slots.mdm_weight = 1.0  # of the masked term beside the next-token term (lambda)

    c.data = ml_collections.ConfigDict()
    c.data.path = "tasks"  # tasks | stdlib | a file or glob: .jsonl, .parquet, text ... | DIR or DIR,DIR of `prepare`
    c.data.weights = ()  # share of each prepared directory in data.path, such as (3,1); empty: by their rows
    c.data.verify = False  # compare each prepared row that is read with its checksum
    c.data.tokenizer = ""  # a sentencepiece model; empty trains one of model.vocab_size pieces on the data
    c.data.mask_piece = "<mask>"  # the tokenizer's piece that stands for a masked token
    c.data.query_field = ""  # JSON field of the prompt; empty: query, question or prompt, what is there
    c.data.response_field = ""  # JSON field of the answer; empty: response, answer or completion
    c.data.text_field = ""  # JSON field of a text without prompt; empty: text
    c.data.on_error = "stop"  # stop | skip (and count) examples that are malformed or longer than a row
    c.data.examples = 40_000  # how many problems to generate (path=tasks)

    c.checkpoint = ml_collections.ConfigDict()
    c.checkpoint.every = 1000  # steps between checkpoints; the last step is always saved
    c.checkpoint.keep = 3  # newest checkpoints kept
    return c


# May differ when a run is resumed: how it runs, and for how long (`steps` also stretches the rest of the schedule).
RESUMABLE = ("accumulation", "remat", "log_every", "profile_steps", "mesh", "checkpoint", "steps")

_CHOICES = {
    "objective": ("refusion", "ar"),
    "schedule": ("cosine", "wsd", "constant"),
    "remat": ("none", "outputs", "full", "offload"),
    "optimizer": ("adamw", "adafactor", "muon"),
    "moment_dtype": ("float32", "bfloat16"),
    "dtype": ("float32", "bfloat16"),
    "data.on_error": ("stop", "skip"),
}
_AT_LEAST_ONE = (
    *("steps", "batch_size", "row_length", "accumulation", "log_every"),
    *("checkpoint.every", "checkpoint.keep", "data.examples"),
    *("model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads", "model.num_key_value_heads"),
    *("model.head_dim", "model.intermediate_size", "model.vocab_size"),
)
_POSITIVE = ("learning_rate", "clip_norm", "slots.eps", "model.rope_theta", "model.rms_norm_eps")
_NOT_NEGATIVE = ("seed", "warmup_steps", "decay_steps", "weight_decay", "final_lr_ratio", "slots.mdm_weight")


def check(c: ml_collections.ConfigDict) -> None:
    """Refuses impossible values.

    Raises:
      UserError: naming the key, the reason, and what would be right.
    """

    def refuse(key: str, why: str):
        raise UserError(f"--config.{key}={_get(c, key)}: {why}")

    _check_keys(c)
    for key, choices in _CHOICES.items():
        if _get(c, key) not in choices:
            refuse(key, f"unknown; known: {', '.join(choices)}")
    for keys, low, strict in ((_AT_LEAST_ONE, 1, False), (_POSITIVE, 0, True), (_NOT_NEGATIVE, 0, False)):
        for key in keys:
            value = _get(c, key)
            if value < low or (strict and value == low):
                refuse(key, f"must be {'above' if strict else 'at least'} {low}")

    if c.batch_size % c.accumulation:
        refuse("batch_size", f"must be a multiple of --config.accumulation={c.accumulation}")
    if not c.slots.sizes or min(c.slots.sizes) < 1:
        refuse("slots.sizes", "must be one or more sizes of at least 1, such as (4,8,16,32)")
    if c.slots.eps >= 1:
        refuse("slots.eps", "must be below 1")
    if c.warmup_steps > c.steps:
        refuse("warmup_steps", f"must not exceed --config.steps={c.steps}")
    if c.schedule == "wsd" and not 0 < c.decay_steps <= c.steps - c.warmup_steps:
        refuse("decay_steps", f"must be 1 to {c.steps - c.warmup_steps} for schedule=wsd (steps without warm-up)")

    if c.profile_steps and not (len(c.profile_steps) == 2 and 1 <= c.profile_steps[0] <= c.profile_steps[1]):
        refuse("profile_steps", "must be a first and a last step, counted from 1, such as (10,12)")

    m = c.model
    if m.num_attention_heads % m.num_key_value_heads:
        refuse("model.num_attention_heads", f"must be a multiple of num_key_value_heads={m.num_key_value_heads}")
    if m.head_dim % 2:
        refuse("model.head_dim", "must be even (RoPE rotates pairs)")

    if sum(size == -1 for size in c.mesh.values()) > 1:
        refuse("mesh", "at most one axis can be -1")
    for axis, size in c.mesh.items():
        if size != -1 and size < 1:
            refuse(f"mesh.{axis}", "must be at least 1, or -1 to take all devices that are left")


def _check_keys(c: ml_collections.ConfigDict) -> None:
    """Refuses a config file that invents a key or leaves one out (another type ml_collections refuses by itself)."""
    known, given = _flatten(default_config().to_dict()), _flatten(c.to_dict())
    for found, what in ((given.keys() - known, "is no config key"), (known.keys() - given, "is missing")):
        if found:
            raise UserError(
                f"--config: {min(found)} {what}; config files start from refusion_jax.config.default_config()"
            )


def check_mesh(c: ml_collections.ConfigDict, mesh: jax.sharding.Mesh) -> None:
    """Refuses sizes that the mesh cannot split evenly.

    Raises:
      UserError: naming the key, the number of parts, and the nearest size that works.
    """
    for key, axis, each in (
        ("batch_size", "batch", c.accumulation),
        ("row_length", "length", 1),
        ("model.vocab_size", "vocab", 1),
        ("model.hidden_size", "embed", 1),
        ("model.num_attention_heads", "heads", 1),
        ("model.num_key_value_heads", "kv_heads", 1),
        ("model.intermediate_size", "mlp", 1),
    ):
        size, parts = _get(c, key), sharding.ways(mesh, axis) * each
        if size % parts:
            names = " x ".join(f"mesh.{name}" for name in sharding.mesh_axes(axis))
            names += " x accumulation" if each > 1 else ""
            most = max(n for n in range(1, parts) if size % n == 0)
            raise UserError(
                f"--config.{key}={size} does not divide into {parts} parts ({names}); "
                f"the next size that does is {-(-size // parts) * parts}, and the nearest mesh has {most} parts there"
            )


def differing_keys(a: dict, b: dict) -> list[str]:
    """Dotted names of the keys in which two nested configs differ."""
    a, b = _flatten(a), _flatten(b)
    return [key for key in sorted(a | b) if a.get(key) != b.get(key)]


def _flatten(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _get(c: ml_collections.ConfigDict, key: str):
    for name in key.split("."):
        c = c[name]
    return c
