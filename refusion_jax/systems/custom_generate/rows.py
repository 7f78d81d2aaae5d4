"""What the decoders in PyTorch share: prompts in, texts out, and one forward. Exports carry it next to generate.py.

Axes: B rows, T tokens of a prompt, W fed tokens, P tokens in the cache, V tokens, without padding of the vocabulary.
"""

import torch

_WITHOUT_EFFECT = {"pad_token_id", "synced_gpus", "token_type_ids", "tokenizer", "use_cache"}  # on the text
_AS_HERE = (("num_beams", 1), ("num_return_sequences", 1))


def decode_rows(
    answer, model, prompts, attention_mask=None, generation_config=None, max_new_tokens=None, do_sample=None, **other
):
    """Prompts and answers, [B, T + new tokens], padded on the right.

    Args:
      answer: (prompt, an int64 tensor without padding; new tokens at most) -> the tokens of its answer.
      model: a causal language model of transformers.
      prompts: [B, T] ids.
      attention_mask: [B, T], 0 at padding; None: there is none.
      generation_config: whose max_new_tokens and do_sample count where those are None.
      max_new_tokens: of an answer; 128 if nobody says.
      do_sample, other: what else `model.generate` was given; what would change the text is refused.

    Raises:
      ValueError: where sampling is asked for, or anything else that this decoding does not do.
    """
    given = {name for name, value in other.items() if value is not None and (name, value) not in _AS_HERE}
    if unknown := sorted(given - _WITHOUT_EFFECT):
        raise ValueError(f"{unknown[0]}: this decoding does not know it; generate.py says what it takes")
    if do_sample or (generation_config and generation_config.do_sample):
        raise ValueError("this decoding is greedy: do_sample=False")
    kept = torch.ones_like(prompts) if attention_mask is None else attention_mask
    count = max_new_tokens or (generation_config and generation_config.max_new_tokens) or 128
    texts = [
        torch.cat([prompt, prompt.new_tensor(answer(prompt[is_kept.bool()], count))])
        for prompt, is_kept in zip(prompts, kept, strict=True)
    ]
    c = model.config
    pad = c.eos_token_id if c.pad_token_id is None else c.pad_token_id
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=pad)


def probabilities(model, cache, tokens, places, visible=None):
    """[W, V], float32, at each fed token, which sees the cache; -1 for tokens that are never chosen.

    Args:
      model: as for `decode_rows`.
      cache: of transformers, P tokens; gets W more.
      tokens, places: W ids, and their positions in the text.
      visible: [W, W] bool, which fed tokens (columns) each (row) sees; None: itself and those before it.
    """
    device, P, W = model.device, cache.get_seq_length(), len(tokens)
    seen = torch.ones(W, P + W, dtype=torch.bool, device=device)
    seen[:, P:] = seen[:, P:].tril() if visible is None else visible
    bias = torch.zeros(W, P + W, dtype=model.dtype, device=device).masked_fill(~seen, torch.finfo(model.dtype).min)
    ids, positions = (torch.tensor([x], device=device) for x in (tokens, places))
    out = model(ids, bias[None, None], positions, cache, use_cache=True)  # by place: transformers renames the cache
    c = model.config
    p = out.logits[0, :, : c.refusion_jax["num_tokens"]].float().softmax(-1)
    p[:, [i for i in {c.mask_token_id, c.pad_token_id} - {None, c.eos_token_id} if i < p.shape[1]]] = -1
    return p
