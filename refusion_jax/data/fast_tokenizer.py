"""Tokenizers of Hugging Face (tokenizer.json; vocab.json and merges.txt of Qwen2's), with their chat template."""

import hashlib
import json
from typing import Any

import pydantic
import tokenizers
from etils import epath

from refusion_jax.cli.errors import UserError, refusing
from refusion_jax.data.chat_template import ChatTemplate
from refusion_jax.data.examples import Messages
from refusion_jax.data.interface import Tokenizer
from refusion_jax.data.tokenizer import MASK_PIECE, SentencePieceTokenizer, byte_of
from refusion_jax.distributed.json_files import parse_json, read_json
from refusion_jax.distributed.storage import read_file

MASK_TOKEN = "<|mask|>"  # ReFusion's on Qwen3's vocabulary
_HERE = "END_OF_WHAT_THE_ANSWER_BEGINS_WITH "  # marks that place in a rendered conversation
THINKING = {"unset": None, "true": True, "false": False}  # of `enable_thinking`, which some chat templates ask for
_KINDS = ("bos", "eos", "pad")
# How byte-level vocabularies write bytes: printable ones as they are, the others as characters from 256 on.
_PRINTED = {*range(33, 127), *range(161, 173), *range(174, 256)}
_BYTES = {chr(byte): byte for byte in _PRINTED}
_BYTES |= {chr(256 + number): byte for number, byte in enumerate(sorted({*range(256)} - _PRINTED))}
# Classes with vocab.json and merges.txt like Qwen2's, and how they split a text before merging bytes.
_QWEN2 = ("Qwen2Tokenizer", "Qwen2TokenizerFast", "DreamTokenizer")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Token(pydantic.BaseModel):
    content: str
    special: bool = False


class _Config(pydantic.BaseModel):
    """The fields of a tokenizer_config.json that we read."""

    model_config = pydantic.ConfigDict(strict=True)

    tokenizer_class: str | None = None
    added_tokens_decoder: dict[int, _Token] = {}
    chat_template: str | None = None
    enable_thinking: bool | None = None  # ours: how a model was trained
    # Whether texts begin with it; None: as tokenizer.json says.
    adds_bos: bool | None = pydantic.Field(None, alias="add_bos_token")
    bos_token: _Token | str | None = None
    eos_token: _Token | str | None = None
    pad_token: _Token | str | None = None
    unk_token: _Token | str | None = None
    sep_token: _Token | str | None = None
    cls_token: _Token | str | None = None
    mask_token: _Token | str | None = None

    @pydantic.field_validator("chat_template", mode="before")
    @classmethod
    def _default(cls, given: Any) -> Any:
        """Of several templates the one named default, which transformers 5 writes to chat_template.jinja."""
        several = (one for one in given if isinstance(one, dict)) if isinstance(given, list) else ()
        return next((one.get("template", given) for one in several if one.get("name") == "default"), given)

    @property
    def special(self) -> dict[str, str]:
        """The special tokens that it names, by the names that templates use."""
        named = {name: getattr(self, name) for name in type(self).model_fields if name.endswith("_token")}
        return {name: getattr(token, "content", token) for name, token in named.items() if token is not None}


class FastTokenizer(Tokenizer):
    """A tokenizer.json, or a vocab.json and merges.txt, with the tokenizer_config.json in its directory.

    If it has no mask token, one is added after its vocabulary, as ReFusion does with Qwen3's. A prompt becomes the turn
    of a user in the chat template, or stays as it is if there is none. Text of an answer is never encoded as special
    tokens, but those that a template writes are.
    """

    def __init__(self, path: epath.Path, mask_piece: str | int, thinking: bool | None = None):
        """Reads the files, of which `path` is tokenizer.json or vocab.json.

        Args:
          mask_piece: the mask token, by its name or its id; MASK_PIECE, or an id without a token: what the files say.
          thinking: `enable_thinking` of the chat template. None: that of tokenizer_config.json, where the tokenizer of
            a run keeps it; if it has none, the variable is not defined for the template.
        """
        self._path, self.left_out = path, {}
        file = path.with_name("tokenizer_config.json")
        if not file.exists():
            raise UserError(
                f'{file}: is missing; it names the special tokens of {path.name}, as {{"eos_token": "</s>"}}'
            )
        self._config_content = read_file(file)
        config = parse_json(self._config_content, _Config, f"{file}", extra="ignore")
        with refusing(f"{path} is not a Hugging Face tokenizer"):
            self._tokenizer = _read_tokenizer(path, config)
        self._tokenizer.no_truncation()  # which a file may ask for: texts are never cut or padded here
        self._tokenizer.no_padding()
        if thinking not in (None, config.enable_thinking):
            self._change_config(enable_thinking=thinking)
        self.thinking = config.enable_thinking if thinking is None else thinking
        own = path.with_name("chat_template.jinja")
        self._template_source = read_file(own).decode(errors="replace") if own.exists() else config.chat_template
        if self._template_source:
            self.has_chat_template = True
            self._template = ChatTemplate(self._template_source, f"{own if own.exists() else file}")
        self._special = config.special
        if self.has_chat_template:
            model, adapters = path.parent, path.with_name("adapter_config.json")
            if adapters.exists() and not (model / "config.json").exists():
                model = epath.Path(str(read_json(adapters).get("base_model_name_or_path")))
            self._end_as_in_turns(read_ends(model))
        # As in transformers, tokens with a role are special ones, also if tokenizer.json does not list them as such.
        named = [token for token in self._special.values() if self._tokenizer.token_to_id(token) is not None]
        self._tokenizer.add_special_tokens(named)
        ids = {kind: self._tokenizer.token_to_id(self._special.get(f"{kind}_token", "")) for kind in _KINDS}
        if ids["eos"] is None:
            raise UserError(f"{file} names no eos_token")
        bos_id, self.eos_id, pad_id = (-1 if found is None else found for found in ids.values())
        # SmolLM2, among others, names a bos token that never begins a text.
        begins = self._tokenizer.encode("").ids[:1] == [bos_id]
        self.bos_id = bos_id if (begins if config.adds_bos is None else config.adds_bos) else -1
        self.pad_id = -1 if pad_id == self.eos_id else pad_id  # decoders never write padding, but must write EOS
        self.mask_id = self._find_mask(mask_piece)
        (self._letter,) = self.encode(["a"])

    def _change_config(self, **changed: Any) -> None:
        self._config_content = json.dumps(json.loads(self._config_content) | changed, indent=2).encode() + b"\n"

    def _end_as_in_turns(self, ends: Any) -> None:
        """If several tokens end a text, makes the one that the chat template writes after an answer the EOS.

        Gemma 3's tokenizer names another one, which ends only documents: with it, a model would go on after its turn.
        """
        if isinstance(ends, list):
            turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
            (written,) = self.encode_chat([self.render_chat(turns)])
            end = next((self.name_of(token) for token in written if token in ends), None)
            if end not in (None, self._special.get("eos_token")):
                self._special["eos_token"] = end
                self._change_config(eos_token=end)

    def _find_mask(self, given: str | int) -> int:
        """The mask token, which is added to the vocabulary if there is none."""
        if isinstance(given, int):
            given = self._tokenizer.id_to_token(given) if 0 <= given < self.size else None
        elif given not in (MASK_PIECE, MASK_TOKEN) and self._tokenizer.token_to_id(given) in (None, self.eos_id):
            raise UserError(
                f"{self._path} has no mask token {given!r}: name one of its tokens, but not EOS, with --mask_piece "
                f"(for `train` --config.data.mask_piece), or leave that out, and {MASK_TOKEN} is added"
            )
        named = (given, MASK_PIECE, self._special.get("mask_token"), MASK_TOKEN)
        mask = next((token for token in named if token and self._tokenizer.token_to_id(token) is not None), MASK_TOKEN)
        self.adds_mask = self._tokenizer.token_to_id(mask) is None
        self._tokenizer.add_special_tokens([mask])
        return self._tokenizer.token_to_id(mask)

    @property
    def files(self) -> dict[str, bytes]:
        files = {"tokenizer.json": self._tokenizer.to_str().encode(), "tokenizer_config.json": self._config_content}
        return files | ({"chat_template.jinja": self._template_source.encode()} if self._template_source else {})

    @property
    def size(self) -> int:
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self._encode(texts, as_text=True)

    def _encode(self, texts: list[str], as_text: bool) -> list[list[int]]:
        if self._tokenizer.encode_special_tokens != as_text:  # else "<|im_end|>" becomes the token of that name; where
            self._tokenizer.encode_special_tokens = as_text  # all calls ask for the same, threads may encode at once
        with refusing(f"{self._path} is a tokenizer that fails"):
            return [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_prompts(self, texts: list[str | Messages | None]) -> list[list[int]]:
        """Ids of prompts in the chat template: a string is the turn of a user; messages are the turns they say."""
        if not self.has_chat_template or isinstance(texts, str):
            return super().encode_prompts(texts)
        rendered = []
        for text in texts:
            turns = text if isinstance(text, tuple) else (("user", text),)
            messages = [{"role": role, "content": content} for role, content in turns]
            rendered.append("" if text is None else self.render_chat(messages))
        for turns, whole in zip(texts, rendered, strict=True):  # empty if the template refuses it
            for role, content in turns if isinstance(turns, tuple) else ():
                if content.strip() not in whole:
                    self.left_out[role] = self.left_out.get(role, 0) + 1
        nothing = [self.bos_id] if self.bos_id >= 0 else []  # while a turn begins as the template says
        return [nothing if text is None else ids for text, ids in zip(texts, self.encode_chat(rendered), strict=True)]

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        thinking: bool | None = None,
        answer_begun: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Renders a conversation as the text that the model continues; to be encoded by `encode_chat`.

        Args:
          messages: {"role", "content"} each; also with "tool_calls", whose arguments are objects.
          thinking: `enable_thinking` of the template; None: as in training.
          answer_begun: the last message is the beginning of the answer; otherwise the answer begins after all of them.
          tools: functions that the template presents to the model, in OpenAI's form.
        """
        if answer_begun:
            messages = [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + _HERE}]
        variables = self._special | {"messages": messages, "add_generation_prompt": not answer_begun}
        variables |= {"tools": tools or None, "documents": None}  # None is none, as in transformers
        thinking = self.thinking if thinking is None else thinking
        if thinking is not None:
            variables["enable_thinking"] = thinking
        text = self._template.render(**variables)
        if not answer_begun:
            return text
        begun, mark, rest = text.rpartition(_HERE.strip())
        if not mark:
            raise UserError("the chat template leaves out the beginning of the answer")
        return begun if rest.startswith(" ") else begun.rstrip()  # otherwise it strips the end of a text

    def encode_chat(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered conversations, in which names of special tokens stand for these."""
        return self._encode(texts, as_text=False)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def spelling(self, token: int) -> bytes:
        name, text = self.name_of(token), self.continuation([token])
        if "\ufffd" not in text or not _BYTES.keys() >= {*name}:  # whole characters
            return text.encode()
        return byte_of(name) if name.startswith("<0x") else bytes(_BYTES[letter] for letter in name)

    def name_of(self, token: int) -> str:
        return self._tokenizer.id_to_token(token)


def read_ends(model: epath.Path) -> Any:
    """The eos_token_id of a Hugging Face directory; as in transformers, that of generation_config.json comes first."""
    files = [file for name in ("generation_config.json", "config.json") if (file := model / name).exists()]
    return next((ids for file in files if (ids := read_json(file).get("eos_token_id")) is not None), None)


def _read_tokenizer(path: epath.Path, config: _Config) -> tokenizers.Tokenizer:
    """The tokenizer from tokenizer.json, or from vocab.json and merges.txt, as in releases of ReFusion and Dream."""
    content = read_file(path).decode()
    if path.name != "vocab.json":
        return tokenizers.Tokenizer.from_str(content)
    if config.tokenizer_class not in _QWEN2:
        raise UserError(f"{path} of tokenizer_class={config.tokenizer_class!r} is not supported: save a tokenizer.json")
    lines = read_file(path.with_name("merges.txt")).decode().split("\n")
    merges = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(json.loads(content), merges))
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    as_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for token_id, token in sorted(config.added_tokens_decoder.items()):
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token.content])
        if tokenizer.token_to_id(token.content) != token_id:
            raise UserError(f"{path} gives {token.content!r} another id than tokenizer_config.json, {token_id}")
    return tokenizer


def load_tokenizer_file(path: epath.PathLike, mask_piece: str | int, thinking: str = "unset") -> Tokenizer:
    """A tokenizer of either kind: tokenizer.json is Hugging Face's, anything else a sentencepiece model.

    The mask token is given by its name or its id; `thinking` is one of THINKING, see `FastTokenizer`.
    """
    path = epath.Path(path)
    if path.suffix == ".json":
        tokenizer = FastTokenizer(path, mask_piece, THINKING[thinking])
    else:
        tokenizer = SentencePieceTokenizer(read_file(path), f"{path}", mask_piece)
    if thinking != "unset" and not tokenizer.has_chat_template:
        raise UserError(f"thinking={thinking}: {path} has no chat template that it could be given to")
    return tokenizer


def find_tokenizer_file(directory: epath.Path) -> epath.Path | None:
    """The tokenizer file of a directory, if it has one; a tokenizer.model alone has no chat template."""
    candidates = (directory / name for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return next((path for path in candidates if path.exists()), None)


def first_difference(one: Tokenizer, other: Tokenizer) -> int | None:
    """The first id that two tokenizers have in common, but for different texts; None if there is none.

    Mask tokens may differ, because everybody who adapts a model chooses one.
    """
    if one.files == other.files:
        return None
    ids = set(range(min(one.size, other.size))) - {one.mask_id, other.mask_id}
    return next((token for token in sorted(ids) if one.decode([token]) != other.decode([token])), None)


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """A hash of a tokenizer's files: if it is equal, ids mean the same text."""
    digest = hashlib.blake2b(digest_size=16)
    for name, content in sorted(tokenizer.files.items()):
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()
