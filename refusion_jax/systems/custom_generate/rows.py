"""What the decoders in PyTorch share: rows of prompts and answers, and one forward pass. Exports include this file.

Axes: B rows, T tokens of a prompt, W fed tokens, P tokens in the cache, V tokens, without padding of the vocabulary.
"""

import torch

_WITHOUT_EFFECT = {"synced_gpus", "token_type_ids", "tokenizer", "use_cache", "bos_token_id"}  # on the text
_WITHOUT_EFFECT |= {"custom_generate", "trust_remote_code"}  # which transformers 4 passes on
_WITHOUT_EFFECT |= {"transformers_version", "_from_model_config"}  # of a GenerationConfig, as are the next
_OF_SAMPLING = {"temperature", "top_k", "top_p"}  # which a GenerationConfig may have for other calls


def decode_rows(answer, model, prompts, attention_mask=None, generation_config=None, unit=1, **given):
    """Prompts and answers, [B, T + new tokens], padded on the right.

    Args:
      answer: (prompt, an int64 tensor without padding; new tokens at most) -> the tokens of its answer.
      model: a causal language model of transformers.
      prompts: [B, T] ids.
      attention_mask: [B, T], 0 at padding; None: there is none.
      generation_config: used for what is not given. The model's own, in generation_config.json, is ignored: the answers
        are those of `refusion_jax.generate`, which does not read it.
      unit: new tokens are rounded up to a multiple of it.
      given: max_new_tokens of an answer (default: 128); pad_token_id (default: the model's, else EOS); and other
        arguments of `model.generate`. Those that would change the text are refused.

    Raises:
      ValueError: if sampling is asked for, or anything else that this decoding does not do, such as texts that are
        longer than the window of local layers, whose cache keeps all tokens here.
    """
    c, given = model.config, {name: value for name, value in given.items() if value is not None}
    asked = (generation_config.to_diff_dict() if generation_config else {}) | given
    count = -(-asked.pop("max_new_tokens", 128) // unit) * unit
    pad = asked.pop("pad_token_id", c.eos_token_id if c.pad_token_id is None else c.pad_token_id)
    if asked.pop("do_sample", False):
        raise ValueError("this decoding is greedy: do_sample=False")
    as_here = {"num_beams": 1, "num_return_sequences": 1, "eos_token_id": c.eos_token_id}
    unknown = {name for name, value in asked.items() if value not in (None, as_here.get(name))}
    if unknown := sorted(unknown - _WITHOUT_EFFECT - (_OF_SAMPLING - given.keys())):
        raise ValueError(f"{unknown[0]}: this decoding does not know it; generate.py says what it takes")
    kept = torch.ones_like(prompts) if attention_mask is None else attention_mask
    window = getattr(c, "sliding_window", None)
    if window and (longest := int(kept.sum(1).max()) + count) > window:
        raise ValueError(f"max_new_tokens: a text of {longest} tokens is more than the {window} that local layers read")
    texts = [
        torch.cat([prompt, prompt.new_tensor(answer(prompt[is_kept.bool()], count))])
        for prompt, is_kept in zip(prompts, kept, strict=True)
    ]
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
