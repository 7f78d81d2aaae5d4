"""Lossless drafting (drafting.py) in PyTorch, for `transformers`: exports carry it as custom_generate/generate.py.

  model.generate(input_ids=ids, max_new_tokens=64, custom_generate=DIR, trust_remote_code=True)

Writes the text that the model writes greedily, one token at a time, in fewer forward passes: each takes the last token,
the drafts of those after it, and a slot of masks that guess what follows the drafts that are likely to be right.

Axes: B rows, T tokens of a prompt, W fed tokens, V vocabulary.
"""

import torch
from transformers import DynamicCache

from .rows import decode_rows, probabilities


@torch.no_grad()
def generate(model, input_ids=None, inputs=None, slot_size=8, **asked):
    """Prompts and answers, [B, T + new tokens], padded on the right.

    Args:
      model: a causal language model of transformers, trained by `dense`.
      input_ids, inputs: [B, T] prompts, by either name.
      slot_size: masks of a forward pass, as many as a slot of the training had.
      asked: max_new_tokens and others, see `decode_rows`.
    """
    prompts = inputs if input_ids is None else input_ids
    return decode_rows(lambda prompt, count: _answer(model, prompt, count, slot_size), model, prompts, **asked)


def _answer(model, prompt, count, slot_size):
    """The tokens of an answer, through the EOS, `count` at most."""
    c, cache, answer = model.config, DynamicCache(), []
    last, drafts, sure = prompt.tolist(), [], []
    while len(answer) < count and c.eos_token_id not in answer:
        # The masks see the drafts before the one that is most likely to be rejected.
        chances = torch.tensor([*sure, 0.0])
        before = torch.cat([torch.ones(1), chances[:-1].cumprod(0)])
        seen = int((before * (1 - chances)).argmax())
        masks = [c.mask_token_id] * slot_size
        place = len(prompt) + len(answer)  # of the first draft
        places = [*range(place - len(last), place + len(drafts)), *range(place + seen, place + seen + slot_size)]
        visible = torch.ones(len(places), len(places), dtype=torch.bool).tril()
        visible[-slot_size:, len(last) + seen : -slot_size] = False
        p = probabilities(model, cache, [*last, *drafts, *masks], places, visible.to(model.device))

        p = p[len(last) - 1 :]
        best = p.argmax(-1).tolist()
        accepted = next((i for i, draft in enumerate(drafts) if draft != best[i]), len(drafts))
        new = best[: accepted + 1][: count - len(answer)]
        if c.eos_token_id in new:
            new = new[: new.index(c.eos_token_id) + 1]
        answer += new
        cache.crop(len(new) - 1 - len(drafts) - slot_size)  # removes what was not committed

        if seen <= accepted:
            guesses = slice(len(drafts) + 1 + len(new) - seen, None)
            drafts, sure = best[guesses], p[guesses].max(-1).values.tolist()
        else:  # those that were not reached
            drafts, sure = drafts[len(new) :], sure[len(new) :]
        last = new[-1:]
    return answer
