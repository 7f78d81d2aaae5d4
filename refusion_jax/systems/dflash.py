"""DFlash ("DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036): a small drafter that reads the
hidden states of the left-to-right model that it drafts for.

The drafter (`--decode.drafter=RUN`), of a layer or two, is fed the last token and M - 1 masks, and drafts the M tokens
that follow in one forward pass. In the text before, it sees each token together with the hidden state from which the
model predicts the next token. The model verifies the drafts by the rule of speculative sampling: greedy, the text is
that of `ar`, token by token; with a temperature it has the same distribution, whatever the drafter. Example with three
drafts, of which the last two are rejected in the first round; p and q were given, and capitals are tokens with hidden
states:

    drafter    sees  P              P Q X
               fed   q M M          y M M
               drafts  x a b          c d e
    model      fed   q x a b        y c d e
               next    x y . .        c d e f
    committed          x y            c d e f

A drafter is trained for one model (`--config.dflash.reads=RUN`), which does not change. Rows become [blocks; text]. A
block of M places begins with its token, the others are masks. They see each other up to themselves, and the text before
the block. The loss is the mean over the response tokens. Example: a b c d in blocks of two (row: query):

                      a M c M A B C D
    inputs    a       1 . . . . . . .
              M       1 1 . . . . . .
              c       . . 1 . 1 1 . .
              M       . . 1 1 1 1 . .
              A       . . . . 1 . . .
              B       . . . . 1 1 . .
              C       . . . . 1 1 1 .
              D       . . . . 1 1 1 1
    labels            b c d . . . . .

From the authors' code (github.com/z-lab/dflash) and SpecForge's pages on training; we have not read the paper: blocks
of a token and masks, the model's hidden states of the text, blocks from the start of a row. Theirs sees hidden states
of several layers and no tokens, ours the last ones and the tokens (without them 3.19 tokens per forward, not 3.71, on
the problems of benchmarks/results/dense.md). Theirs shares embedding and output head with the model, ours has its own.
Masks of theirs predict their own token and see the later masks, too; ours predict the next token and are causal, so
that a shorter block drafts the same tokens as the start of a longer one. Our choice: the first token of a document is
never a mask, even inside a block. Left out: weights that fall along a block.

Axes: B rows, T row length or tokens of a forward pass, M drafts, D hidden size, V vocabulary.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, Key

from refusion_jax.batch.batch import Batch, mean_over
from refusion_jax.batch.rows import Rows, join, next_in_row, precedes_response, row_index, text_positions
from refusion_jax.batch.visibility import CausalStreams, Visibility
from refusion_jax.cli.errors import UserError
from refusion_jax.cli.settings import setting
from refusion_jax.decoding import cache as kv
from refusion_jax.decoding.auxiliary import in_vocabulary
from refusion_jax.decoding.reference import ReferenceDecoder
from refusion_jax.decoding.requests import Layout, Request
from refusion_jax.model.interface import LanguageModel, Wrapper
from refusion_jax.model.key_values import KeyValues, attend_over
from refusion_jax.model.ragged import Ragged
from refusion_jax.model.shape import READ_ALIKE
from refusion_jax.systems import ar, pard
from refusion_jax.systems.interface import Objective, System


@dataclasses.dataclass(frozen=True)
class DraftBlocks(Objective):
    """Mean CE of the next tokens, predicted by a token and the masks after it."""

    coefficients: ClassVar[dict[str, float]] = {"mdm": 1.0}
    streams: ClassVar[int] = 2  # blocks and the text

    reads: str = setting("", "run or model to draft for, whose hidden states the drafter reads")
    draft_length: int = setting(7, "tokens of a block, learnt and drafted at once", at_least=1, at_most=4096)

    @property
    def pattern(self) -> CausalStreams:
        return CausalStreams(self.draft_length)

    def corrupt(self, rows: Rows, keys: Key[Array, "B"]) -> Batch:
        """[blocks; rows], each place of a block labelled with the next token of its document; uses no noise."""
        positions, weight = text_positions(rows.segment_ids), mean_over(precedes_response(rows))
        is_first = (row_index(rows.tokens) % self.draft_length == 0) | (positions == 0)
        return Batch(
            inputs=join(jnp.where(is_first, rows.tokens, self.mask_id), rows.tokens),
            positions=join(positions, positions),
            visibility=Visibility.of(self.pattern, join(rows.segment_ids, rows.segment_ids)),
            labels=join(*[next_in_row(rows.tokens)] * 2),
            weights={"mdm": join(weight, 0 * weight)},
        )


class WithDrafter(Wrapper):
    """A model and the drafter that reads its hidden states, on one cache: the model's layers, then the drafter's."""

    def __init__(self, model: LanguageModel):
        super().__init__(model)
        self.drafter = model.drafter
        for key in READ_ALIKE:
            if (there := getattr(self.drafter.config, key)) != (here := getattr(model.config, key)):
                raise UserError(f"--decode.drafter reads another model, whose {key} is {there}, not {here}")

    def empty_cache(self, rows: int, capacity: int) -> KeyValues:
        return _stacked(self.model.empty_cache(rows, capacity), self.drafter.empty_cache(rows, capacity))

    def extend_hidden(
        self, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"], *seen: Any
    ) -> tuple[Float[Array, "B T D"], KeyValues]:
        """As in the model, with the keys and values that the drafter computes from the hidden states added."""
        x, new = self.model.extend_hidden(tokens, positions, *seen)
        return x, _stacked(new, self._through_drafter(self.drafter.embedded_with(tokens, x), positions, *seen)[1])

    def draft(
        self, last: Int32[Array, "B"], place: Int32[Array, "B"], cache: kv.Cache, M: int
    ) -> Float32[Array, "B M V"]:
        """Logits of the M tokens after the last one, which is not in the cache yet."""
        offset = jnp.arange(M)[None]
        fed = jnp.where(offset == 0, last[:, None], self.drafter.config.mask_token_id)
        x, visible = self.drafter.embedded(fed), jnp.tril(jnp.ones((len(last), M, M), bool))
        x, _ = self._through_drafter(x, place[:, None] + offset, cache.entries, cache.length, visible)
        return in_vocabulary(self.drafter.logits(self.drafter.normed(x)), self.drafter.config, self.config.vocab_size)

    def _through_drafter(self, x, positions, cached, length, visible) -> tuple[Float[Array, "B T D"], KeyValues]:
        attend = attend_over(cached, length, visible, Ragged.whole(*x.shape[:2]), self.config.num_hidden_layers)
        return self.drafter.through_layers(x, positions, attend)[:2]


def _stacked(model: KeyValues, drafter: KeyValues) -> KeyValues:
    return jax.tree.map(lambda *layers: jnp.concatenate(layers), model, drafter)


@dataclasses.dataclass(frozen=True)
class ReadingSettings(pard.DraftedSettings):
    """How to decode a left-to-right model with a drafter that reads its hidden states."""

    auxiliary_models = {"drafter": {"objective": "dflash", "dflash.reads": "{run}", "model.num_hidden_layers": 1}}

    drafter: str = setting("", "Run of `dflash` that was trained to draft for this model", scope="compiled")


class ReadAndDraft(ar.Speculative):
    """Verifies the drafts of such a drafter."""

    settings: ClassVar[type[ReadingSettings]] = ReadingSettings

    def init(self, model: LanguageModel, layout: Layout, keys: Key[Array, "B"]) -> ar.LeftToRightState:
        return super().init(WithDrafter(model), layout, keys)

    def step(self, model: LanguageModel, s: ar.LeftToRightState) -> ar.LeftToRightState:
        """One forward pass of each model, after which each row commits the accepted drafts and one more token."""
        model, M = WithDrafter(model), self.width - 1
        drafts, q = self.draw_drafts(s, model.draft(s.last, s.next_places(1)[:, 0] - 1, s.cache, M))
        after, tokens, _ = self.verify(model, s, s.last, drafts, jnp.full_like(s.last, M), q)
        return after.replace(last=tokens[:, -1])


def reference(model: LanguageModel, request: Request) -> dict:
    """The decoder in plain Python: one request, no cache, greedy. Drafts are those of the training model."""
    plain, drafter = ReferenceDecoder(model, request), nnx.clone(model.drafter)
    drafter.target_model, masks = model.model, [drafter.config.mask_token_id] * (request.settings.draft_length - 1)
    while not plain.is_complete():
        text = list(plain.text.values())
        row = text + masks
        padded = np.zeros((2, 1, 1 << max(5, len(row).bit_length())), np.int32)
        padded[0, 0, : len(row)], padded[1, 0, len(text) - 1 :] = row, 1
        drafts = plain.next_tokens(np.asarray(_probabilities(*nnx.split(drafter), *padded))[: len(row)])
        plain.commit_verified(drafts, plain.next_tokens(plain.forward("verify", text + drafts)))
    return plain.result()


@functools.partial(jax.jit, static_argnums=0)
def _probabilities(graphdef, params, tokens: Int32[Array, "1 T"], group: Int32[Array, "1 T"]) -> Float32[Array, "T V"]:
    drafter, index = nnx.merge(graphdef, params), row_index(tokens)
    logits = drafter(tokens, index, Visibility(jnp.ones_like(tokens), index, group))
    return jax.nn.softmax(logits[0, :, : drafter.config.num_tokens])


SYSTEM = System(
    name="dflash",
    objective=DraftBlocks,
    decoders={"dflash": ReadAndDraft},
    references={"dflash": reference},
    scoring=ar.SCORING,
    decodes=("ar",),
)
