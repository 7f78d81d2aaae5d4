"""Plan and infill (decoder.py) in PyTorch, for `transformers`: exports carry it as custom_generate/generate.py.

  model.generate(input_ids=ids, max_new_tokens=64, custom_generate=DIR, trust_remote_code=True)

ReFusion (arXiv 2512.13586, section 3.3) with exact infilling: slots are planned in any order, the chosen ones are fed
together, and drafts that are already right are committed. Every token sees what was fed before it, so that the cache
grows in the order of commitment; nothing in it is computed again.

Axes: B rows, T tokens of a prompt, W fed tokens, V vocabulary.
"""

import torch
from transformers import DynamicCache

from .rows import decode_rows, probabilities


@torch.no_grad()
def generate(
    model, input_ids=None, inputs=None, slot_size=8, serial_blocks=1, slot_threshold=0.9, infill_blend=0.5, **asked
):
    """Prompts and answers, [B, T + new tokens], padded on the right.

    Args:
      model: a causal language model of transformers, trained by `refusion`.
      input_ids, inputs: [B, T] prompts, by either name.
      slot_size: tokens of a slot.
      serial_blocks: the answer is cut into so many runs of whole slots, decoded one after the other; its length is
        rounded up to them.
      slot_threshold: slots with a first token more probable than this are chosen, at least one.
      infill_blend: weight of the plan's probabilities in the choice between its draft and the next token.
      asked: max_new_tokens and others, see `decode_rows`.
    """

    def answer(prompt, count):
        return _answer(model, prompt, _blocks(count, slot_size, serial_blocks), slot_threshold, infill_blend)

    prompts, unit = inputs if input_ids is None else input_ids, slot_size * serial_blocks
    return decode_rows(answer, model, prompts, unit=unit, **asked)


def _blocks(count, slot_size, serial_blocks):
    """The slots of each block: ranges of places in the answer."""
    per_block = count // (slot_size * serial_blocks)
    slots = [range(i * slot_size, (i + 1) * slot_size) for i in range(per_block * serial_blocks)]
    return [slots[i : i + per_block] for i in range(0, len(slots), per_block)]


def _answer(model, prompt, blocks, threshold, blend):
    """The tokens of an answer, through the EOS."""
    c, cache, start = model.config, DynamicCache(), len(prompt)
    text = {}  # place in the answer -> token

    def predicted(fed):
        """place -> [V] for each place that is fed, a dict from places to tokens."""
        p = probabilities(model, cache, [*fed.values()], [start + place for place in fed])
        return dict(zip(fed, p, strict=True))

    probabilities(model, cache, prompt.tolist(), [*range(start)])
    for block in blocks:
        slots = block
        while slots:
            # Plan: masks for all slots that are left. Those with a confident first token are chosen.
            p = predicted({place: c.mask_token_id for slot in slots for place in slot})
            cache.crop(-len(p))  # removes the entries of the masks
            sure = [float(p[slot[0]].max()) for slot in slots]
            chosen = [slot for slot, chance in zip(slots, sure, strict=True) if chance > threshold]
            chosen = chosen or [slots[sure.index(max(sure))]]
            now = {place: int(p[place].argmax()) for slot in chosen for place in slot}

            # Verify: each draft that differs from the wanted token at its place is replaced by it. The first
            # replacement is final, since everything before it is right; whole slots that are right are committed.
            while chosen:
                now = {place: now[place] for slot in chosen for place in slot}
                right = now | _wanted(chosen, p, predicted(now), blend)
                places = [*now]
                final = next((i for i, place in enumerate(places) if now[place] != right[place]), len(places))
                ends = [i for i, place in enumerate(places[:final]) if now[place] == c.eos_token_id]
                whole = [slot for slot in chosen if places.index(slot[-1]) < final]
                count = ends[0] + 1 if ends else sum(map(len, whole))
                text |= {place: now[place] for place in places[:count]}
                if count < len(places):
                    cache.crop(count - len(places))
                chosen, now = [] if ends else chosen[len(whole) :], right

            end = min((place for place, token in text.items() if token == c.eos_token_id), default=None)
            slots = [slot for slot in slots if slot[0] not in text and (end is None or slot[0] < end)]
        if end is not None:
            break
    answer = [text[place] for place in sorted(text)]
    return answer[: answer.index(c.eos_token_id) + 1] if c.eos_token_id in answer else answer


def _wanted(chosen, p, q, blend):
    """place -> the wanted token, from the probabilities of the plan, p, and of the drafts, q; not of first tokens.

    It is the model's own next token, or the plan's draft if the mix of both distributions makes that more probable.
    """
    wanted = {}
    for place in (place for slot in chosen for place in slot[1:]):
        follows, draft = int(q[place - 1].argmax()), int(p[place].argmax())
        planned = (1 - blend) * q[place - 1][draft] + blend * p[place][draft]
        wanted[place] = draft if planned > (1 - blend) * q[place - 1][follows] else follows
    return wanted
