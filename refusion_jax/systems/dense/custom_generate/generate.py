"""Lossless drafting (drafting.py) in PyTorch, for `transformers`: exports carry it as custom_generate/generate.py.

  model.generate(input_ids=ids, max_new_tokens=64, custom_generate=DIR, trust_remote_code=True)

Writes the text that the model writes greedily, one token at a time, in fewer forwards: each feeds the last token, the
drafts of those after it, and a slot of masks that guess what follows the drafts that are likely to be right.

Axes: W fed tokens, P tokens in the cache.
"""

import torch
from transformers import DynamicCache


@torch.no_grad()
def generate(
    model,
    input_ids=None,
    inputs=None,
    attention_mask=None,
    generation_config=None,
    max_new_tokens=None,
    slot_size=8,
    **others,
):
    """Prompts and answers, padded on the right.

    Args:
      model: a causal language model of transformers, trained by `dense`.
      input_ids, inputs: [B, T] prompts, by either name.
      attention_mask: [B, T], 0 at padding; None: there is none.
      generation_config: whose max_new_tokens counts where that is None.
      max_new_tokens: of an answer; 128 if nobody says.
      slot_size: masks of a forward, as many as a slot of the training had.
      others: what transformers passes along; sampling is refused.
    """
    if others.get("do_sample") or (generation_config and generation_config.do_sample):
        raise ValueError("this decoding is greedy: do_sample=False")
    prompts = inputs if input_ids is None else input_ids
    kept = torch.ones_like(prompts) if attention_mask is None else attention_mask
    count = max_new_tokens or (generation_config and generation_config.max_new_tokens) or 128
    texts = [
        torch.cat([prompt, prompt.new_tensor(_answer(model, prompt[is_kept.bool()], count, slot_size))])
        for prompt, is_kept in zip(prompts, kept, strict=True)
    ]
    pad = model.config.pad_token_id if model.config.pad_token_id is not None else model.config.eos_token_id
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=pad)


def _answer(model, prompt, count, slot_size):
    """The tokens of an answer, through the EOS, `count` at most."""
    c, cache, answer = model.config, DynamicCache(config=model.config), []
    last, drafts, sure = prompt.tolist(), [], []
    while len(answer) < count and c.eos_token_id not in answer:
        # The masks see the drafts before the one that is most likely to be rejected.
        chances = torch.tensor([*sure, 0.0])
        before = torch.cat([torch.ones(1), chances[:-1].cumprod(0)])
        seen = int((before * (1 - chances)).argmax())
        masks = [c.mask_token_id] * slot_size
        place = len(prompt) + len(answer)  # of the first draft
        places = [*range(place - len(last), place + len(drafts)), *range(place + seen, place + seen + slot_size)]
        p = _probabilities(model, cache, [*last, *drafts, *masks], places, len(last) + seen, slot_size)

        p = p[len(last) - 1 :]
        best = p.argmax(-1).tolist()
        accepted = next((i for i, draft in enumerate(drafts) if draft != best[i]), len(drafts))
        new = best[: accepted + 1][: count - len(answer)]
        if c.eos_token_id in new:
            new = new[: new.index(c.eos_token_id) + 1]
        answer += new
        cache.crop(len(new) - 1 - len(drafts) - slot_size)  # so many are taken away

        if seen <= accepted:
            guesses = slice(len(drafts) + 1 + len(new) - seen, None)
            drafts, sure = best[guesses], p[guesses].max(-1).values.tolist()
        else:  # those that were not reached
            drafts, sure = drafts[len(new) :], sure[len(new) :]
        last = new[-1:]
    return answer


def _probabilities(model, cache, tokens, places, seen, slot_size):
    """[W, V] at each fed token; the masks, which are last, see `seen` of the others and the masks before them."""
    device, P, W = model.device, cache.get_seq_length(), len(tokens)
    visible = torch.ones(W, W, dtype=torch.bool, device=device).tril()
    visible[-slot_size:, seen : W - slot_size] = False
    visible = torch.cat([torch.ones(W, P, dtype=torch.bool, device=device), visible], dim=1)
    bias = torch.zeros(W, P + W, dtype=model.dtype, device=device).masked_fill(~visible, torch.finfo(model.dtype).min)
    out = model(
        input_ids=torch.tensor([tokens], device=device),
        position_ids=torch.tensor([places], device=device),
        attention_mask=bias[None, None],
        past_key_values=cache,
        use_cache=True,
    )
    logits = out.logits[0].float()
    never = {model.config.mask_token_id, model.config.pad_token_id} - {None}
    logits[:, list(never)] = -torch.inf
    return logits.softmax(-1)
