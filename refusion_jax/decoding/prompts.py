"""Reads prompts and templates from JSONL as token ids, and writes answers as text."""

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from absl import logging

from refusion_jax.cli.errors import UserError, check_characters, naming
from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.requests import Answer, Request
from refusion_jax.decoding.settings import Settings
from refusion_jax.decoding.stops import Stops
from refusion_jax.distributed.json_files import read_json_lines

Decode: TypeAlias = Callable[[list[int]], str]  # text of token ids
CONTEXT = 8  # how many tokens before a token its text may depend on


def asked_prompts(
    prompt: str | None, file: str | None, tokenizer: Tokenizer | None, settings: Settings
) -> tuple[Sequence[object], Sequence[Request]]:
    """Ids and requests from --prompt, or from the file of --input."""
    if file is None:
        return (0,), (Request(encode_prompt(prompt, tokenizer, "--prompt"), name="--prompt"),)
    return tuple(zip(*read_prompts(Path(file), tokenizer, settings), strict=True))


def read_prompts(path: Path, tokenizer: Tokenizer | None, settings: Settings) -> list[tuple[object, Request]]:
    """(id, request) of each line of a JSONL file; UserError names the file and line at fault."""
    prompts, misplaced = [], {}
    for number, item in read_json_lines(path):
        where = f"{path}:{number}"
        misplaced = dict.fromkeys(settings.changeable & item.keys(), where) | misplaced
        request = read_request(item, tokenizer, settings, where)
        noise = 0 if "seed" in item.get("decode", {}) else len(prompts)
        prompts.append((item.get("id", number - 1), dataclasses.replace(request, noise=noise)))
    if not prompts:
        raise UserError(f"{path} holds no prompt")
    for name, where in sorted(misplaced.items()):
        logging.warning(
            '%s: %s has no effect there; a setting of a prompt is {"decode": {"%s": ..}}', where, name, name
        )
    return prompts


def read_request(item: dict, tokenizer: Tokenizer | None, settings: Settings, where: str) -> Request:
    """The request of one line; UserError names the line, the key at fault and what it must be."""
    given, template = {"prompt", "prompt_ids"} & set(item), item.get("template", [])
    prompt = item[min(given)] if given else None
    is_prompt = isinstance(prompt, str) if given == {"prompt"} else is_id_list(prompt)
    if len(given) > 1 or not (is_prompt or prompt is None and template):
        raise UserError(
            f'{where}: must be {{"prompt": "text"}} or {{"prompt_ids": [ids]}}, '
            f'{{"template": ["text", 40, "text"]}}, or both'
        )
    if not isinstance(template, list) or not all(isinstance(x, str) or _is_int32(x) or is_id_list(x) for x in template):
        raise UserError(f"{where}: template must list given texts (or lists of ids) and lengths of gaps")
    own = item.get("decode", {})
    if not isinstance(own, dict) or not set(own) <= settings.changeable:
        raise UserError(f"{where}: decode must be an object with keys of {', '.join(sorted(settings.changeable))}")
    with naming(where):
        changed = dataclasses.replace(settings, **own) if own else None
    return Request(
        prompt if isinstance(prompt, list) else encode_prompt(prompt, tokenizer, where),
        tuple(encode(x, tokenizer, where, i > 0) if isinstance(x, str) else x for i, x in enumerate(template)),
        changed,
        name=where,
    )


def encode_prompt(text: str | None, tokenizer: Tokenizer | None, where: str) -> list[int]:
    """Token ids of a prompt in the form that the model is trained on; for None, those that precede any answer."""
    if text is None and tokenizer is None:
        return []  # a template of token ids needs no tokenizer
    _need(tokenizer, where)
    check_characters(text or "", where)
    with naming(where):
        return tokenizer.encode_prompts([text])[0]


def encode(text: str, tokenizer: Tokenizer | None, where: str, inside: bool) -> list[int]:
    """Token ids of a text of a template, at its beginning or inside it."""
    _need(tokenizer, where)
    return (tokenizer.encode_inside if inside else tokenizer.encode)([text])[0]


def to_record(id: object, answer: Answer, tokenizer: Tokenizer | None, stops: Stops) -> dict[str, object]:
    """An answer as a record of --output, cut before the first stop string."""
    tokens, reason = answer.tokens, answer.finish_reason
    text = tokenizer.decode(tokens) if tokenizer else None
    if text is not None:
        text, is_cut = stops.cut(text)
        if is_cut:
            tokens, reason = tokens_of(text, tokens, tokenizer.decode), "stop"
    told = {name: getattr(answer, name) for name in ("commit_order", "forwards", "rounds")}
    return {"id": id, "text": text, "tokens": tokens, **told, "finish_reason": reason}


def tokens_of(text: str, tokens: list[int], decode: Decode) -> list[int]:
    """The shortest prefix of the tokens whose text begins with this prefix of their text."""
    count = bisect.bisect_left(range(len(tokens)), True, key=lambda n: decode(tokens[:n]).startswith(text))
    return tokens[:count]


def spelled(text: Mapping[int, int], at: int, tokenizer: Tokenizer) -> str:
    """The text that a token adds to those before it, back to a gap; the last byte of a character adds all of it."""
    begins = next((i for i in range(at, at - CONTEXT, -1) if i - 1 not in text), at - CONTEXT)
    tokens = [text[i] for i in range(begins, at + 1)]
    before, whole = (tokenizer.decode(ids).rstrip("\ufffd") for ids in (tokens[:-1], tokens))
    return whole[len(before) :]


def _need(tokenizer: Tokenizer | None, where: str) -> None:
    if tokenizer is None:
        raise UserError(f"{where}: this model came without a tokenizer; give ids instead of text")


def is_id_list(value: object) -> bool:
    """Whether a value from JSON is a list of numbers that could be token ids."""
    return isinstance(value, list) and all(map(_is_int32, value))


def _is_int32(value: object) -> bool:
    return type(value) is int and -(2**31) <= value < 2**31
