"""Our models as a language model of lm_eval (EleutherAI's evaluation harness).

What is asked is answered by the continuous-batching queue (`generate_until`) or by the exact likelihood
(`loglikelihood`, `loglikelihood_rolling`), written to the journal at once, where there is one, and not asked again.
"""

import collections
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.console import Console
from rich.progress import track

from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.journal import Journal
from refusion_jax.decoding.queue import Answer
from refusion_jax.decoding.requests import Request
from refusion_jax.decoding.settings import Settings
from refusion_jax.decoding.stops import Stops
from refusion_jax.evaluation.generation import check_fits, generate, settle, shorten
from refusion_jax.evaluation.hosts import Hosts
from refusion_jax.evaluation.likelihood import likelihoods
from refusion_jax.model.int8 import is_int8
from refusion_jax.model.transformer import Transformer
from refusion_jax.runtime.errors import UserError

_NEW_TOKENS = 256  # where neither flags nor task say; lm_eval's own
_TEXTS = 256  # scored between two words to the journal


@dataclasses.dataclass(frozen=True)
class Asked:
    """One sample that is wanted."""

    key: str
    prompt: Sequence[int]
    settings: Settings
    noise: int  # its draws are a function of this and the seed
    until: Stops
    limit: int  # tokens of the answer that count
    is_cut: bool  # the beginning of the prompt was left out


class EvaluatedModel(TemplateLM):
    """A model, its tokenizer, and how it is to decode."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        name: str,
        method: str,
        flags: dict[str, Any],
        fingerprint: str = "",
        journal: Journal | None = None,
        chat: bool = False,
        thinking: bool = False,
        scoring: dict[str, Any] | None = None,
        alive: Callable[[], None] = lambda: None,
    ):
        """Wraps them.

        Args:
          model: from `load_model`.
          tokenizer: its own.
          name: where the model came from.
          method: of decoding.
          flags: settings of decoding that were asked for; they go before those of tasks and requests.
          fingerprint: of its weights: the journal may hold answers of others.
          journal: of what has been answered; None: that is forgotten with this object.
          chat: prompts are rendered by the tokenizer's chat template.
          thinking: and answers may begin with thinking.
          scoring: slot_size, order, draws and seed of `likelihoods`, where they are not its defaults.
          alive: called at every answer.
        """
        super().__init__()
        self.model, self.name, self._method, self._flags = model, name, method, flags
        self._tokenizer, self.chat, self.thinking = tokenizer, chat, thinking
        self._scoring, self._alive = scoring or {}, alive
        self._room = model.config.max_position_embeddings
        self._identity = [name, fingerprint]
        self._journal = journal
        self.known: dict[str, dict[str, Any]] = journal.records if journal else {}
        self.known_before = set(self.known)
        self.task_settings: dict[str, dict[str, Any]] = {}  # by task; from the metadata of its file

    def _keep(self, key: str, record: dict[str, Any]) -> None:
        if self._journal:
            self._journal.add(key, record)
        self.known[key] = record
        self._alive()

    # Tokens and chats.

    @property
    def eot_token_id(self) -> int:
        """The end of text."""
        return self.model.config.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        begin = self.model.config.bos_token_id
        return begin if begin >= 0 else self.eot_token_id

    @property
    def max_length(self) -> int:
        """Tokens that the model reads."""
        return self._room

    @property
    def tokenizer_name(self) -> str:
        """For lm_eval's caches of prompts, which are not used."""
        return self.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Token ids as the model is trained on them: behind its bos, if it has one; of a chat, with its marks."""
        if self.chat and add_special_tokens is not False:
            return self._tokenizer.encode_chat([string])[0]
        ids = self._tokenizer.encode([string])[0]
        begin = self.model.config.bos_token_id
        return ids if add_special_tokens is False or begin < 0 else [begin, *ids]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """For the log: that there is one."""
        return "the tokenizer's own" if self.chat else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders turns; without `add_generation_prompt` the last one is the beginning of the answer."""
        return self._tokenizer.render_chat(chat_history, self.thinking, answer_begun=not add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        """What the results name the model by."""
        return {"checkpoint": self.name, "fingerprint": self._identity[1], "scoring": self._scoring}

    # Generation.

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, each cut where the first of its stop strings begins."""
        asked, hosts = self.asked(requests), Hosts(self.model)
        own = hosts.own_share(len(asked))
        missing = [number for number in own if asked[number].key not in self.known]
        some = [asked[number] for number in missing]
        wanted = [self._request(a, number) for a, number in zip(some, missing, strict=True)]

        def is_over(at: int, tokens: list[int]) -> bool:
            until = some[at].until
            return bool(until.texts) and until.is_settled(self._tokenizer.decode(tokens[: some[at].limit]))

        looking = is_over if any(a.until.texts for a in some) else None
        for at, answer, seconds in _shown(generate(self.model, wanted, looking), len(wanted), "decoding"):
            self._keep(some[at].key, self._record(some[at], answer, seconds))
            self.cache_hook.add_partial("generate_until", requests[missing[at]].args, self.known[some[at].key]["text"])
        records = hosts.exchange([self.known[asked[number].key] for number in own], len(asked))
        self.known |= {a.key: record for a, record in zip(asked, records, strict=True)}  # those of other hosts
        return [record["text"] for record in records]

    def check(self, requests: list[Instance]) -> None:
        """Refuses, before anything is decoded, what cannot be answered.

        Raises:
          UserError: where answers do not fit into what the model reads, or the batch not into memory.
        """
        wanted = [self._request(a, number) for number, a in enumerate(self.asked(requests))]
        check_fits(self.model, wanted)

    def _request(self, asked: Asked, number: int) -> Request:
        return Request(asked.prompt, settings=asked.settings, noise=asked.noise, name=f"sample {number}")

    def asked(self, requests: list[Instance]) -> list[Asked]:
        """What each request wants; one that comes several times wants several samples."""
        times: collections.Counter[str] = collections.Counter()
        asked = []
        for request in requests:
            context, options = request.args
            wanted = self._settings(request.task_name, options)
            until = options.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            settings = settle(wanted, self._method, self._room)
            plain = [
                self._identity,
                request.task_name,
                context,
                until,
                self.chat,
                wanted["max_new_tokens"],
                dataclasses.asdict(settings),
            ]
            plain[-1].pop("batch_size")  # answers do not depend on it
            same = key_of("generate", *plain)
            key, noise = key_of(same, times[same]), _number(request.task_name, context, times[same])
            times[same] += 1
            ids = self.tok_encode(context)
            prompt = shorten(ids, settings, self._room)
            limit, is_cut = wanted["max_new_tokens"], len(prompt) < len(ids)
            asked.append(Asked(key, prompt, settings, noise, Stops(tuple(until)), limit, is_cut))
        return asked

    def _settings(self, task: str, options: dict[str, Any]) -> dict[str, Any]:
        """Flags go before what the request says, and that before what its task file says."""
        values = {"max_new_tokens": _NEW_TOKENS} | self.task_settings.get(task, {})
        if "max_gen_toks" in options:
            values["max_new_tokens"] = int(options["max_gen_toks"])
        draws = options.get("do_sample", True) is not False
        values |= {name: options[name] for name in ("temperature", "top_p", "top_k") if draws and name in options}
        if "temperature" in values:
            values["temperature"] = float(values["temperature"] or 0)
        return values | self._flags

    def _record(self, asked: Asked, answer: Answer, seconds: float) -> dict[str, Any]:
        """What the journal keeps of an answer."""
        tokens = answer.tokens[: asked.limit]
        text, is_stopped = asked.until.cut(self._tokenizer.decode(tokens))
        reason = "stop" if is_stopped else "length" if len(tokens) < len(answer.tokens) else answer.finish_reason
        return {
            "text": text,
            "tokens": len(answer.tokens),  # decoded; where a stop string ended it, those behind that too
            "forwards": answer.forwards,
            "finish_reason": reason,
            "is_cut": asked.is_cut,
            "seconds": round(seconds, 6),
            "host": jax.process_index(),
        }

    # Likelihood.

    def _loglikelihood_tokens(self, requests, **_: object) -> list[tuple[float, bool]]:
        return self._score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts; of what is longer than the model reads, with as much context as fits."""
        texts, of_text = [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0], add_special_tokens=False), self.prefix_token_id, self._room - 1, 1
            )
            some = [make_disjoint_window(window) for window in windows]
            texts += some
            of_text += [number] * len(some)
        totals = [0.0] * len(requests)
        for number, (nats, _) in zip(of_text, self._score(texts), strict=True):
            totals[number] += nats
        return totals

    def _score(self, texts: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(nats, is greedy) of (context, continuation); of a context that is too long its end is read."""
        how = {"method": self._method, **self._scoring}
        texts = [(context[-max(self._room - len(text), 1) :], text) for context, text in texts]
        if (longest := max((len(text) for _, text in texts), default=0)) > self._room - 1:
            raise UserError(f"a continuation of {longest} tokens cannot be scored: the model reads {self._room}")
        keys = [key_of("likelihood", self._identity, how, context, text) for context, text in texts]
        hosts = Hosts(self.model)
        own = hosts.own_share(len(texts))
        missing = [number for number in own if keys[number] not in self.known]
        parts = [missing[at : at + _TEXTS] for at in range(0, len(missing), _TEXTS)]
        for part in _shown(parts, len(parts), "scoring"):
            contexts, continuations = zip(*(texts[number] for number in part), strict=True)
            numbers = [_number(*texts[number]) for number in part]
            scored = likelihoods(self.model, contexts, continuations, keys=numbers, **how)
            for number, likelihood in zip(part, scored, strict=True):
                self._keep(keys[number], dataclasses.asdict(likelihood))
        records = hosts.exchange([self.known[keys[number]] for number in own], len(texts))
        return [(record["nats"], record["is_greedy"]) for record in records]


def key_of(*parts: object) -> str:
    """The same for the same parts, in any process; parts are made of what JSON knows."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _number(*parts: object) -> int:
    """`key_of`, as a number below 2^32 on which draws may depend."""
    return int(key_of(*parts)[:8], 16)


def fingerprint(model: Transformer) -> str:
    """The same for the same weights: of their shapes, and of some that every training step changes."""
    weights = nnx.to_pure_dict(nnx.state(model))
    shapes = jax.tree.map(lambda x: [*x.shape, str(jax.tree.leaves(x)[0].dtype)], weights, is_leaf=is_int8)
    some = np.asarray(jax.device_get(model.final_norm[...]), np.float32)
    return key_of(shapes, some.tolist())


def _shown(items, total: int, what: str) -> Callable:
    """The items, with a bar on a terminal."""
    console = Console(stderr=True)
    return track(items, what, total, console=console, disable=not total or not sys.stderr.isatty())
