"""LLaDA (Nie et al., "Large Language Diffusion Models", arXiv 2502.09992): masked diffusion, bidirectional, no cache.

Training: per document t ~ U(0, 1) and p = (1 - eps) t + eps. Each response token is masked with probability p, prompt
tokens never. The loss is the cross-entropy of the masked tokens themselves (not shifted), weighted by 1 / p.

    text       p q a b c d          the mask is a matrix of ones:
    inputs     p q a M c M          every token sees its whole document
    labels     . . . b . d

Decoding: every forward pass runs over the whole text. The answer is cut into blocks that are decoded one after the
other. A block of n masks takes a fixed number of steps, each of which commits the n / steps most confident ones. A
temperature adds Gumbel noise to the logits, but not to the confidences.

With `merge`, only the middle one of every `merge` masks after the block is fed, at its position, in the spirit of ToMA
(arXiv 2509.10918), which merges similar tokens of an image. A group is then one key in attention, which is an
approximation. With a block of two after three given tokens and merge = 3 (the last group may be smaller):

    text       p q r M M | M M M M M        fed        p q r M M   M     M

From the paper and the authors' code: schedule, order of commitment, 1 / p. Our choices: t and the normalization
are per document, as documents are packed; padding takes the places of other documents, in the order in which they are
packed or, with `shuffle`, in a random one; a row stops once all places up to an EOS are committed, and after the block
in which one was.

Axes: B rows, T row length, C text length, N tokens to decode, K block length, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Key

from refusion_jax.batch.batch import Batch, count_documents
from refusion_jax.batch.masking import PADDING, draw_masks, pad_answers, shuffle_documents
from refusion_jax.batch.rows import Rows, per_document_sum, text_positions
from refusion_jax.batch.visibility import BIDIRECTIONAL, Pattern, Visibility
from refusion_jax.cli.settings import setting
from refusion_jax.decoding import settings as shared
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.sampling import put
from refusion_jax.model.families import Release
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems import masked
from refusion_jax.systems.interface import Objective, ScoredText, ScoredTokens, Scoring, System


@dataclasses.dataclass(frozen=True)
class MaskedDiffusion(Objective):
    """1 / N * sum over masked tokens of CE / (p R), with R response tokens of the token's document (LLaDA, eq. 3)."""

    coefficients: ClassVar[dict[str, float]] = {"mdm": 1.0}
    pattern: ClassVar[Pattern] = BIDIRECTIONAL

    padding: float = PADDING()
    shuffle: bool = setting(
        False, "shuffle the documents of a row before some are replaced by padding, so that the longest, which come "
        "first, are replaced as often as others: a model learns where they end, but needs more steps",
    )  # fmt: skip

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        rows, is_masked, p = self.draw(rows, keys)
        response_length = jnp.maximum(per_document_sum(rows.is_response, rows.segment_ids), 1)
        return Batch(
            inputs=jnp.where(is_masked, self.mask_id, rows.tokens),
            positions=text_positions(rows.segment_ids),
            visibility=Visibility.of(self.pattern, rows.segment_ids),
            labels=rows.tokens,
            weights={"mdm": is_masked / (count_documents(rows.segment_ids) * p * response_length)},
            diagnostics={"mask_ratio": p},
        )

    def draw(self, rows: Rows, keys: Key[Array, "B"]) -> tuple[Rows, Bool[Array, "B T"], Float32[Array, "B T"]]:
        """(the rows, padded after some answers; which tokens are masked; their probability of being masked)."""
        rows = shuffle_documents(rows, keys) if self.shuffle else rows
        rows = pad_answers(rows, keys, self.padding, self.eos_id)
        return rows, *draw_masks(rows, keys)


@dataclasses.dataclass(frozen=True)
class DiffusionSettings(shared.Settings):
    """How to decode a masked diffusion model."""

    steps: int = setting(0, "Passes for an answer of max_new_tokens; 0: one per token", at_least=0, at_most=2**24)
    block_length: int = setting(
        0, "Tokens of a block; blocks are decoded one after the other; 0: the whole answer", at_least=0, at_most=2**24
    )

    merge: int = setting(
        1, "Feed only one of this many masks after the block: fewer tokens per forward, but an approximation",
        scope="compiled", at_least=1, at_most=2**24,
    )  # fmt: skip

    def check(self) -> None:
        blocks = -(-self.max_new_tokens // (self.block_length or self.max_new_tokens or 1))
        if self.steps and blocks and self.steps % blocks:
            self.refuse("steps", f"must be a multiple of the {blocks} blocks of block_length={self.block_length}")

    @classmethod
    def operating_points(cls, new_tokens: int, trained: Mapping[str, Any]) -> list[dict[str, Any]]:
        whole = [{"steps": max(1, new_tokens // tokens)} for tokens in (1, 2, 4, 8)]
        return whole + [{"block_length": 8, "steps": -(-new_tokens // 8) * forwards} for forwards in (8, 4, 2)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Denoise(masked.OnSchedule):
    """Fills one block after the other, on a schedule."""

    settings: ClassVar[type[DiffusionSettings]] = DiffusionSettings

    merge: int

    def fed(self, s: masked.MaskedText) -> Bool[Array, "B C"] | None:
        if self.merge == 1:
            return None
        return fed_places(s, s.block_start + s.block_length, self.merge)


def fed_places(s: masked.MaskedText, after: Int32[Array, "B"], merge: int) -> Bool[Array, "B C"]:
    """Which places of the text are fed; none in finished rows.

    `after` is the index, among the places to decode, of the first one after the block; from it on masks are merged.
    """
    places, text = s.places, jnp.arange(s.text.shape[1])[None]
    number = jnp.arange(places.position.shape[1])[None] - after[:, None]  # [B, N], counted from after the block
    left = places.count[:, None] - after[:, None]
    group = number - number % merge
    middle = (jnp.minimum(merge, left - group) - 1) // 2
    is_left_out = (number >= 0) & (number < left) & (number - group != middle)
    into = jnp.where(is_left_out, places.position, s.text.shape[1])
    kept = put(jnp.ones(s.text.shape, jnp.int32), into, jnp.zeros_like(into)) > 0
    return kept & (text < s.length[:, None]) & s.active[:, None]


def reference(model: LanguageModel, request: Request) -> dict:
    """The decoder in plain Python: one request, greedy."""
    plain, s = ReferenceDecoder(model, request, keeps_cache=False), request.settings
    n = len(plain.places)
    length = s.block_length or n
    for start in range(0, n, length):
        block, after = plain.places[start : start + length], plain.places[start + length :]
        groups = [after[i : i + s.merge] for i in range(0, len(after), s.merge)]
        left_out = set(after) - {group[(len(group) - 1) // 2] for group in groups}
        fed = [place for place in range(request.length) if place not in left_out]
        counts = masked.evenly(len(block), s.steps // -(-n // length) or len(block))
        masked.fill(plain, counts, lambda p, place: p[plain.best(p, place)], block, model.config.shifted, fed)
        if plain.has_ended:
            break
    return plain.result()


def scoring_forward(text: ScoredText) -> ScoredTokens:
    """The forward pass that scores a text: one draw of a lower bound of log p (LLaDA, eq. 6 and its appendix).

    Of the R tokens of the continuation l ~ U{1 .. R} are masked. The bound is the mean over draws of R / l times the
    sum of their log-probabilities.
    """
    P, R = len(text.prompt), len(text.continuation)
    random = np.random.default_rng(text.draw)
    hidden = P + random.permutation(R)[: random.integers(1, R + 1)]
    labels = np.concatenate([text.prompt, text.continuation])
    tokens, weights = labels.copy(), np.zeros(P + R, np.float32)
    tokens[hidden], weights[hidden] = text.mask_id, R / len(hidden)
    index, everywhere = np.arange(P + R, dtype=np.int32), np.zeros(P + R, np.int32)
    return ScoredTokens(
        tokens=tokens,
        positions=index,
        rank=everywhere,
        group=everywhere,
        labels=labels,
        weights=weights,
        places=index - P,
    )


SCORING = Scoring(scoring_forward, is_bound=True)

RELEASE = Release(  # LLaDA-8B and LLaDA 1.5
    "llada",
    "llama",
    keys={
        "d_model": "hidden_size",
        "embedding_size": "vocab_size",
        "max_sequence_length": "max_position_embeddings",
        "mlp_hidden_size": "intermediate_size",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "n_layers": "num_hidden_layers",
        "weight_tying": "tie_word_embeddings",
    },
    names={
        name: f"model.transformer.{theirs}.weight"
        for name, theirs in {
            "embed_tokens": "wte",
            "attention_norm": "blocks.{}.attn_norm",
            "q_proj": "blocks.{}.q_proj",
            "k_proj": "blocks.{}.k_proj",
            "v_proj": "blocks.{}.v_proj",
            "o_proj": "blocks.{}.attn_out",
            "mlp_norm": "blocks.{}.ff_norm",
            "gate_proj": "blocks.{}.ff_proj",
            "up_proj": "blocks.{}.up_proj",
            "down_proj": "blocks.{}.ff_out",
            "final_norm": "ln_f",
            "lm_head": "ff_out",
        }.items()
    },
    defaults={"rms_norm_eps": 1e-5, "bos_token_id": None},
    fixed={
        "architectures": ["LLaDAModelLM"],  # that of LLaDA-MoE has the same model_type
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "multi_query_attention": None,
        "rope": True,
        "scale_logits": False,
    },
    ignored=(
        *("alibi_bias_max", "attention_layer_norm_with_affine", "embedding_dropout", "flash_attention"),
        *("init_cutoff_factor", "init_device", "init_fn", "init_std", "mlp_ratio", "precision", "residual_dropout"),
        *("rope_full_precision", "train_max_sequence_length"),
    ),
)

SYSTEM = System(
    name="llada",
    objective=MaskedDiffusion,
    decoders={"llada": Denoise},
    references={"llada": reference},
    former={"eps": 1e-3},
    decodes=("r2ft",),
    scoring=SCORING,
    releases=(RELEASE,),
)
