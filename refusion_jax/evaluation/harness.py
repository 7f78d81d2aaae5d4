"""An adapter that makes our models language models of lm_eval (EleutherAI's evaluation harness).

Requests are answered by the continuous-batching queue (`generate_until`) or by the likelihood of the system
(`loglikelihood`, `loglikelihood_rolling`). With a journal, every answer is written at once and never computed twice.
"""

import collections
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from refusion_jax.cli.errors import UserError
from refusion_jax.cli.progress import track
from refusion_jax.data.fast_tokenizer import tokenizer_hash
from refusion_jax.data.interface import Tokenizer
from refusion_jax.decoding.journal import Journal
from refusion_jax.decoding.player import Decodings
from refusion_jax.decoding.prompts import to_record
from refusion_jax.decoding.requests import Answer, Request
from refusion_jax.decoding.stops import Stops
from refusion_jax.decoding.trajectory import Trajectory
from refusion_jax.evaluation.generation import check_fits, generate, settings_for
from refusion_jax.evaluation.hosts import exchange, own_share
from refusion_jax.evaluation.likelihood import likelihoods, longest_scored
from refusion_jax.model.interface import LanguageModel
from refusion_jax.systems.registry import system_of

_NEW_TOKENS = 256  # lm_eval's default, if neither flags nor task set it
# Options from which lm_eval's own models read the length of an answer; the first one present counts.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_TEXTS = 256  # scored between two writes to the journal


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sample to decode."""

    key: str
    request: Request
    until: Stops
    limit: int  # number of tokens of the answer that are used
    is_cut: bool  # whether the prompt's beginning was cut off


@dataclasses.dataclass(eq=False, repr=False)
class EvaluatedModel(TemplateLM):
    """A model with its tokenizer and decode settings, in lm_eval's form."""

    model: LanguageModel  # from `load_model`
    tokenizer: Tokenizer
    _: dataclasses.KW_ONLY
    name: str  # where the model came from
    method: str  # name of the decoder
    flags: dict[str, Any]  # decode settings from the command line; they override those of tasks and requests
    fingerprint: str = ""  # changes with the weights, since a journal may hold answers from others
    journal: Journal = dataclasses.field(default_factory=lambda: Journal(None))  # of all answers; by default in memory
    chat: bool = False  # whether prompts are rendered by the tokenizer's chat template
    thinking: bool | None = None  # `enable_thinking` of the chat template; None: as in training
    scoring: dict[str, Any] | None = None  # slot_size, order, draws and seed of `likelihoods`, unless default
    alive: Callable[[], None] = lambda: None  # called after every answer
    played: int = 0  # number of problems per task whose decoding is recorded, for a page
    task_settings: Mapping[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # of decoding, by task

    def __post_init__(self):
        super().__init__()
        self.thinking = self.tokenizer.thinking if self.thinking is None else self.thinking
        self.scoring = self.scoring or {}
        self._room = self.model.config.max_position_embeddings
        self._scored = longest_scored(self.model.config, self.method)
        self._identity = [self.name, self.fingerprint, tokenizer_hash(self.tokenizer)]
        self.known: dict[str, dict[str, Any]] = self.journal.records
        self.known_before = set(self.known)
        # Requested samples, by task and number of the problem.
        self.asked: dict[str, dict[int, list[Sample]]] = collections.defaultdict(lambda: collections.defaultdict(list))

    def _keep(self, key: str, record: dict[str, Any]) -> None:
        self.journal.add(key, record)
        self.alive()

    # Tokens and chats.

    @property
    def eot_token_id(self) -> int:
        return self.model.config.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before a text without context."""
        known = (self.tokenizer.bos_id, self.model.config.bos_token_id, self.eot_token_id)
        return next(begin for begin in known if begin >= 0)

    @property
    def tokenizer_name(self) -> str:
        """Required by lm_eval for its prompt cache, which is not used."""
        return self.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Token ids in the form used in training: with the BOS token, if any, or as a chat."""
        if self.chat and add_special_tokens is not False:
            return self.tokenizer.encode_chat([string])[0]
        ids = self.tokenizer.encode([string])[0]
        begin = self.tokenizer.bos_id  # a model's config may name one that its tokenizer never writes
        return ids if add_special_tokens is False or begin < 0 else [begin, *ids]

    def chat_template(self, chat_template: bool | str = False) -> str:
        return "the tokenizer's own" if self.chat else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders turns; without `add_generation_prompt` the last turn is the beginning of the answer."""
        return self.tokenizer.render_chat(chat_history, self.thinking, answer_begun=not add_generation_prompt)

    def get_model_info(self) -> dict[str, Any]:
        return {"checkpoint": self.name, "fingerprint": self._identity[1], "scoring": self.scoring}

    # Generation.

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, each cut before its first stop string."""
        samples = self.samples(requests)
        for request, sample in zip(requests, samples, strict=True):
            self.asked[request.task_name][request.doc_id].append(sample)
        own = own_share(self.model, len(samples))
        missing = [number for number in own if samples[number].key not in self.known]
        some = [samples[number] for number in missing]
        wanted = [a.request for a in some]

        def is_over(at: int, answer: Answer) -> bool:
            until = some[at].until
            return bool(until.texts) and until.is_certain(self.tokenizer.decode(answer.tokens[: some[at].limit]))

        looking = is_over if any(a.until.texts for a in some) else None
        played = {at for at, number in enumerate(missing) if requests[number].doc_id < self.played}
        decodings = Decodings(self.method, self.tokenizer)

        def record(at: int, trajectory: Trajectory) -> None:
            if at in played:
                decodings.record(at, trajectory)

        answers = generate(self.model, wanted, looking, record if self.played else None)
        for at, answer, seconds in track(answers, "decoding", len(wanted)):
            kept = self._record(some[at], answer, seconds)
            if at in played:
                decodings.add(at, wanted[at], answer, kept["tokens"])
                # Plans are left out, so that a log of many steps stays small.
                scene = dataclasses.replace(decodings.scenes[at], plans=[[] for _ in range(answer.forwards)])
                kept["scene"] = dataclasses.asdict(scene)
            self._keep(some[at].key, kept)
            self.cache_hook.add_partial("generate_until", requests[missing[at]].args, self.known[some[at].key]["text"])
        records = exchange(self.model, [self.known[samples[number].key] for number in own], len(samples))
        self.known |= {a.key: record for a, record in zip(samples, records, strict=True)}  # also other hosts'
        return [record["text"] for record in records]

    def check(self, requests: list[Instance]) -> None:
        """Checks requests before anything is decoded.

        Raises UserError if answers do not fit into the model's context, if the batch does not fit into memory, or if
        texts are to be scored and the system defines no likelihood. Prompts that are cut are told as a warning.
        """
        system = system_of(self.method)
        scored = [request for request in requests if request.request_type != "generate_until"]
        if scored and system.scoring is None:
            raise UserError(
                f"--tasks={scored[0].task_name}: needs the likelihood of texts, which is not known for {system.name} "
                f"models: take tasks whose output_type is generate_until"
            )
        generated = [request for request in requests if request.request_type == "generate_until"]
        samples = self.samples(generated)
        self._tell_of_cut([sample.is_cut for sample in samples])
        check_fits(self.model, [sample.request for sample in samples])

    def _tell_of_cut(self, cut: list[bool]) -> None:
        if any(cut):
            what = f"{sum(cut)} of {len(cut)} prompts lose their beginning"
            logging.warning("%s, as the model reads only %d tokens, answer included", what, self._room)

    def samples(self, requests: list[Instance]) -> list[Sample]:
        """The sample to decode for each request; a repeated request gets a new sample each time."""
        times: collections.Counter[str] = collections.Counter()
        samples = []
        for request in requests:
            context, options = request.args
            wanted = self._settings(request.task_name, options)
            until = options.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            if not all(isinstance(text, str) for text in until):
                raise UserError(f"--tasks={request.task_name}: until={str(until)[:60]} must be texts")
            until = [text for text in until if text]  # every answer would end before an empty one
            settings = settings_for(wanted, self.method, self._room, self.model.config)
            plain = dataclasses.asdict(settings)
            plain.pop("batch_size")  # answers do not depend on it
            asked = self._identity, request.task_name, context, until, self.chat, wanted["max_new_tokens"]
            same = key_of("generate", *asked, plain)
            key, noise = key_of(same, times[same]), _number(request.task_name, context, times[same])
            times[same] += 1
            ids = self.tok_encode(context)
            prompt = ids[-(self._room - settings.new_tokens) :]  # its end, with room for the answer
            own = Request(prompt, settings=settings, noise=noise, name=f"sample {len(samples)}")
            limit, is_cut = wanted["max_new_tokens"], len(prompt) < len(ids)
            samples.append(Sample(key, own, Stops(tuple(until)), limit, is_cut))
        return samples

    def _settings(self, task: str, options: dict[str, Any]) -> dict[str, Any]:
        """Decode settings of a request: flags override the request's options, which override those of the task file."""
        values = {"max_new_tokens": _NEW_TOKENS} | self.task_settings.get(task, {})
        length = next((options[name] for name in _LENGTHS if options.get(name) is not None), values["max_new_tokens"])
        values["max_new_tokens"] = int(length)
        draws = options.get("do_sample", True) is not False
        values |= {name: options[name] for name in ("temperature", "top_p", "top_k") if draws and name in options}
        if "temperature" in values:
            values["temperature"] = float(values["temperature"] or 0)
        return values | self.flags

    def _record(self, sample: Sample, answer: Answer, seconds: float) -> dict[str, Any]:
        if len(answer.tokens) > sample.limit:
            answer = dataclasses.replace(answer, tokens=answer.tokens[: sample.limit], finish_reason="length")
        record = to_record(sample.key, answer, self.tokenizer, sample.until)
        return {
            "text": record["text"],
            "tokens": len(record["tokens"]),  # what was decoded after the stop string is useless and not counted
            "forwards": answer.forwards,
            "finish_reason": record["finish_reason"],
            "is_cut": sample.is_cut,
            "seconds": round(seconds, 6),
            "host": jax.process_index(),
        }

    # Likelihood.

    loglikelihood = functools.partialmethod(TemplateLM.loglikelihood, disable_tqdm=True)  # it ignores TQDM_DISABLE

    def _loglikelihood_tokens(self, requests, **_: object) -> list[tuple[float, bool]]:
        return self._score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts; texts longer than the context are scored in windows with as much context as fits."""
        texts, of_text = [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0], add_special_tokens=False), self.prefix_token_id, self._scored - 1, 1
            )
            some = [make_disjoint_window(window) for window in windows]
            texts += some
            of_text += [number] * len(some)
        totals = [0.0] * len(requests)
        for number, (nats, _) in zip(of_text, self._score(texts), strict=True):
            totals[number] += nats
        return totals

    def _score(self, texts: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(nats, is greedy) of each (context, continuation); too long contexts lose their beginning."""
        how = {"method": self.method, **self.scoring}
        self._tell_of_cut([len(context) + len(text) > self._scored for context, text in texts])
        texts = [(context[-max(self._scored - len(text), 1) :], text) for context, text in texts]
        if (longest := max((len(text) for _, text in texts), default=0)) > self._scored - 1:
            raise UserError(f"a continuation of {longest} tokens cannot be scored: the model reads {self._room}")
        keys = [key_of("likelihood", self._identity, how, context, text) for context, text in texts]
        own = own_share(self.model, len(texts))
        missing = [number for number in own if keys[number] not in self.known]
        parts = [missing[at : at + _TEXTS] for at in range(0, len(missing), _TEXTS)]
        for part in track(parts, "scoring", len(parts)):
            contexts, continuations = zip(*(texts[number] for number in part), strict=True)
            numbers = [_number(*texts[number]) for number in part]
            scored = likelihoods(self.model, contexts, continuations, keys=numbers, **how)
            for number, likelihood in zip(part, scored, strict=True):
                self._keep(keys[number], dataclasses.asdict(likelihood))
        records = exchange(self.model, [self.known[keys[number]] for number in own], len(texts))
        return [(record["nats"], record["is_greedy"]) for record in records]


def key_of(*parts: object) -> str:
    """A digest of JSON values; the same in every process."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _number(*parts: object) -> int:
    """A digest below 2^32, for seeding draws."""
    return int(key_of(*parts)[:8], 16)
