"""The shape of a transformer: read from a file and checked before anything is built."""

import dataclasses
from typing import Annotated, Any

import ml_collections
from etils import epath
from pydantic import Field

from refusion_jax.cli.errors import UserError
from refusion_jax.distributed.json_files import to_type
from refusion_jax.model.families import FAMILIES

_Positive = Annotated[float, Field(gt=0, le=1e12)]

# A model and one that reads its hidden states must agree in these, as they share one cache of keys and values.
READ_ALIKE = ("hidden_size", "num_key_value_heads", "head_dim")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RareFields:
    """Parameters of the shape that only few families have, under Hugging Face's names."""

    num_experts: int = 0  # per layer, in place of an MLP of intermediate_size; 0 in dense families
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # of an expert
    norm_topk_prob: bool = True  # whether the weights of a token's experts sum to 1
    router_aux_loss_coef: float = 0.001  # of the loss that balances them
    first_k_dense_replace: int = 0  # layers before the first with experts
    num_shared_experts: int = 0  # an MLP as wide as this many experts, through which every token goes
    n_group: int = 1  # groups of experts; a token chooses from topk_group of them
    topk_group: int = 1
    routed_scaling_factor: float = 1.0  # of the weights of a token's experts
    partial_rotary_factor: float = 1.0  # the part of a head that RoPE rotates
    no_rope_layer_interval: int = 0  # every n-th layer is without RoPE; 0: none


# Keys of config.json, and of `ModelConfig`, that only families with a default for them have.
OPTIONAL = (*(field.name for field in dataclasses.fields(RareFields)), "query_pre_attn_scalar")


@dataclasses.dataclass(frozen=True)
class ModelConfig(RareFields):
    """The shape of the transformer, and what its token ids mean, under Hugging Face's names."""

    vocab_size: Annotated[int, Field(ge=1, le=2**24)]  # rows of the embedding
    hidden_size: Annotated[int, Field(ge=1, le=2**20)]
    num_hidden_layers: Annotated[int, Field(ge=1, le=2**14)]
    num_attention_heads: Annotated[int, Field(ge=1, le=2**14)]
    num_key_value_heads: Annotated[int, Field(ge=1, le=2**14)]
    head_dim: Annotated[int, Field(ge=2, le=2**14, multiple_of=2)]
    intermediate_size: Annotated[int, Field(ge=1, le=2**22)]
    rope_theta: Annotated[float, Field(gt=0, le=1e12)]
    rms_norm_eps: Annotated[float, Field(gt=0, le=1)]
    tie_word_embeddings: bool
    max_position_embeddings: Annotated[int, Field(ge=1, le=2**28)]  # positions the model was trained on
    num_tokens: Annotated[int, Field(ge=1, le=2**24)]  # ids in use; the rows after them are padding
    pad_token_id: int
    bos_token_id: int
    eos_token_id: int
    mask_token_id: int
    shifted: bool = False  # trained to read a masked token from the logits at the token before it
    block_size: Annotated[int, Field(ge=0, le=2**20)] = 0  # tokens denoised together in training, if known
    family: str = "qwen3"  # one of `families.FAMILIES`
    rope_scaling: tuple[_Positive, ...] = ()  # see `layers.rope_rotation`
    local_rope: tuple[_Positive, ...] = ()  # of Gemma 3: (rope_theta of local layers, every n-th layer is global)
    query_pre_attn_scalar: Annotated[int, Field(ge=0, le=2**20)] = 0  # attention divides by its root; 0: head_dim's


def to_model_config(path: epath.PathLike, content: dict[str, Any]) -> ModelConfig:
    """The shape of a model, from the values in a file; UserError names the key that is missing or impossible."""
    config = to_type(content, ModelConfig, f"{path} cannot be read")
    ids = {f"{kind}_token_id": getattr(config, f"{kind}_token_id") for kind in ("pad", "bos", "eos", "mask")}
    wrong = [f"{name}={i} is not a row of the embedding" for name, i in ids.items() if not -1 <= i < config.vocab_size]
    if config.num_tokens > config.vocab_size:
        wrong.append(f"num_tokens={config.num_tokens} are more than vocab_size={config.vocab_size}")
    if fault := family_fault(config) or shape_fault(config) or next(iter(wrong), None):
        raise UserError(f"{path} describes no model: {fault}")
    return config


def family_fault(c: ModelConfig | ml_collections.ConfigDict) -> str | None:
    """What is wrong with the family, or with parts that few families have, such as experts; None: nothing."""
    if c.family not in FAMILIES:
        return f"family={c.family[:60]} must be one of {', '.join(FAMILIES)}"
    family = FAMILIES[c.family]
    for field in dataclasses.fields(ModelConfig):
        value = getattr(c, field.name, None)
        if field.name in OPTIONAL and field.name not in family.defaults and value != field.default:
            return f"{field.name}={value}: family={c.family} has none"
    if c.local_rope and "rope_local_base_freq" not in family.defaults:
        return f"local_rope={c.local_rope}: family={c.family} has none"
    E, groups = c.num_experts, c.n_group
    for name, least, most in (
        ("num_experts", 1, 2**14),
        ("num_experts_per_tok", 1 if family.router == "softmax" else 2, E),  # one's sigmoid would be normalized to 1
        ("moe_intermediate_size", 1, 2**22),
        ("router_aux_loss_coef", 0, 10**6),
        ("first_k_dense_replace", 0, c.num_hidden_layers - 1),
        ("num_shared_experts", 0, 2**7),
        ("n_group", 1, E),
        ("topk_group", 1, groups),
        ("routed_scaling_factor", 0, 10**6),
        ("no_rope_layer_interval", 1, 2**15),
    ):
        if name in family.defaults and not least <= getattr(c, name) <= most:
            return f"{name}={getattr(c, name)} must be {least} to {most} for family={c.family}"
    if not family.experts:
        return None
    if groups > 1 and (E % groups or E < 2 * groups or E // groups * c.topk_group < c.num_experts_per_tok):
        return (
            f"n_group={groups} must split num_experts={E} evenly, into two or more each, and topk_group={c.topk_group} "
            f"of them must have num_experts_per_tok={c.num_experts_per_tok}"
        )
    rotated = int(c.head_dim * c.partial_rotary_factor)
    if rotated % 2 or not 0 < rotated <= c.head_dim:
        return f"partial_rotary_factor={c.partial_rotary_factor} must give an even part of head_dim={c.head_dim}"
    return None


def shape_fault(c: ModelConfig | ml_collections.ConfigDict) -> str | None:
    """What is wrong with sizes that must match in every family; None: nothing."""
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    if heads % kv_heads:
        return f"num_attention_heads={heads}: must be a multiple of num_key_value_heads={kv_heads}"
    for name, lengths in (("rope_scaling", (0, 1, 4)), ("local_rope", (0, 2))):
        numbers = getattr(c, name)
        if len(numbers) not in lengths or not all(type(x) in (int, float) and 0 < x <= 1e12 for x in numbers):
            return f"{name}={numbers}: must be {' or '.join(map(str, lengths[1:]))} numbers above 0"
    if len(c.rope_scaling) == 4 and c.rope_scaling[1] >= c.rope_scaling[2]:
        return f"rope_scaling={c.rope_scaling}: low_freq_factor must be less than high_freq_factor"
    return None
