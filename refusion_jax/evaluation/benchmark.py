"""Runs tasks of lm_eval (its own, pinned ones, and the user's) and summarizes the cost of decoding."""

import contextlib
import dataclasses
import difflib
import functools
import importlib.metadata
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of lm_eval and datasets would clutter a training log

import datasets
import lm_eval
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

import refusion_jax
from refusion_jax.cli.errors import UserError
from refusion_jax.evaluation import sandbox
from refusion_jax.evaluation.harness import EvaluatedModel, Sample, key_of

PINNED = Path(__file__).parent / "tasks"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to evaluate."""

    tasks: Sequence[str]
    include_path: Path | None = None  # the user's task files; they override the pinned ones, which override lm_eval's
    task_data: Path | None = None  # a file TASK.jsonl in it replaces the download of the task's data
    limit: int | None = None  # number of problems per task, from the first
    num_fewshot: int | None = None  # number of few-shot examples, for tasks that have any
    allow_code_execution: bool = False
    unsafe: bool = False  # run generated code without the sandbox
    flags: str = "--"  # prefix of the flags, for error messages


def load_tasks(plan: Plan) -> list[Task | Group]:
    """The tasks with their data, each once, in its group if requested; UserError for tasks that cannot run."""
    for name, path in (("include_path", plan.include_path), ("task_data", plan.task_data)):
        if path and not path.is_dir():
            raise UserError(f"{plan.flags}{name}={path} is not a directory")
    for library in ("datasets", "huggingface_hub"):  # they log many lines about what they then raise
        logging.getLogger(library).setLevel(logging.CRITICAL)
    logger = logging.getLogger("lm_eval")
    logger.handlers, logger.propagate = [_Last()], False
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    loaded, seen = [], set()
    with _task_files(plan) as manager:
        for name in sorted(plan.tasks, key=lambda name: name not in manager.all_groups):  # lm_eval refuses a task twice
            some = _load(manager, name, plan)
            new = [task for member, task in some["tasks"].items() if member not in seen]
            loaded += [some["groups"][name]] if name in some["groups"] and len(new) == len(some["tasks"]) else new
            seen |= some["tasks"].keys()
    if plan.task_data and not any(_local_file(name, plan) for name in seen):
        needed = ", ".join(f"{name}.jsonl" for name in list(seen)[:3])
        raise UserError(f"{plan.flags}task_data={plan.task_data}: no task reads a file from it; they read {needed}")
    for task in members(loaded):
        _check(task, plan)
    return loaded


def members(tasks: Sequence[Task | Group]) -> list[Task]:
    """The tasks, including those in groups."""
    return [task for some in tasks for task in (some.get_all_tasks() if isinstance(some, Group) else [some])]


@contextlib.contextmanager
def _task_files(plan: Plan) -> Iterator[TaskManager]:
    """lm_eval's index of task files; tasks with a file in `task_data` read that."""
    paths = [PINNED, *([plan.include_path] if plan.include_path else [])]
    try:
        manager = TaskManager(include_path=paths, include_defaults=False)
        if has_others := not all(name in manager.all_tasks for name in plan.tasks):
            manager = TaskManager(include_path=paths)  # takes seconds, as lm_eval has thousands of files
    except Exception as error:  # task files may contain anything
        raise UserError(
            f"{plan.flags}include_path={plan.include_path}: cannot be searched for tasks: {_reason(error)}"
        ) from error
    with tempfile.TemporaryDirectory() as directory:
        for name in (path.stem for path in plan.task_data.glob("*.jsonl")) if plan.task_data else ():
            if name in manager.all_subtasks:
                changed = {"include": str(manager.task_index[name].yaml_path.absolute()), "task": name}
                changed |= {"dataset_path": "json", "dataset_name": None, "custom_dataset": None, "test_split": "test"}
                changed["dataset_kwargs"] = {"data_files": {"test": str(_local_file(name, plan))}}
                Path(directory, f"{name}.yaml").write_text(json.dumps(changed))  # JSON is valid YAML
        if os.listdir(directory):
            manager = TaskManager(include_path=[*paths, directory], include_defaults=has_others)
        yield manager


def _load(manager: TaskManager, name: str, plan: Plan) -> dict[str, Any]:
    if name not in manager.all_tasks:
        close = difflib.get_close_matches(name, manager.all_tasks, n=3)
        other = f"{plan.flags}include_path=DIR names a directory of task files"
        hint = f"did you mean {' or '.join(close)}?" if close else other
        raise UserError(f"{plan.flags}tasks={name}: no such task; {hint}")
    try:
        return manager.load([name])
    except (Exception, SystemExit) as error:  # datasets, the hub and task files may raise anything
        file = f"DIR/{name if name in manager.all_subtasks else 'TASK'}.jsonl"
        raise UserError(
            f"{plan.flags}tasks={name}: it cannot be loaded: {_reason(error)}; if its data cannot be "
            f"downloaded here, put it into {file} and give {plan.flags}task_data=DIR"
        ) from error


class _Last(logging.Handler):
    """Keeps the last error that lm_eval has logged: the exception that it then raises may say nothing."""

    said = ""

    def emit(self, record: logging.LogRecord) -> None:
        _Last.said = record.getMessage()


def _reason(error: BaseException) -> str:
    """Why a task cannot be used, in one line."""
    said = str(error.__cause__ or error) or _Last.said
    return f"{type(error).__name__}: {' '.join(said.split())[:300]}"


def _local_file(task: str, plan: Plan) -> Path | None:
    """The file with the data of a task, if there is one."""
    file = plan.task_data and (plan.task_data / f"{task}.jsonl").absolute()
    return file if file and file.exists() else None


def _check(task: Task, plan: Plan) -> None:
    name, metadata = task.config.task, task.config.metadata or {}
    if plan.num_fewshot and task.config.num_fewshot == 0:
        raise UserError(f"--num_fewshot={plan.num_fewshot}: {name} is a task without examples; leave the flag out")
    for metric, function in getattr(task, "_metric_fn_list", {}).items():
        if function is None and not callable(task.config.process_results):  # it computes its own metrics
            raise UserError(f"{plan.flags}tasks={name}: there is no metric {metric}")
    if not getattr(task, "UNSAFE_CODE", False):
        return
    if not plan.allow_code_execution:
        leave = f"{plan.flags}allow_code_execution"
        raise UserError(f"{plan.flags}tasks={name} runs code that the model writes: give {leave} to let it")
    if not (isinstance(metadata, dict) and metadata.get("sandboxed")) and not plan.unsafe:
        raise UserError(
            f"{plan.flags}tasks={name} runs generated code itself, outside the sandbox: take humaneval or mbpp, which "
            f"use it; only `evaluate --unsafe` runs such a task"
        )


class _Rehearsal(LM):
    """Checks requests and gives empty answers."""

    def __init__(self, lm: EvaluatedModel):
        super().__init__()
        self._lm, self.apply_chat_template = lm, lm.apply_chat_template
        self.asked: list[list[str]] = []

    tokenizer_name = property(lambda self: self._lm.tokenizer_name)

    def _answer(self, requests: list[Instance], answer: Any) -> list[Any]:
        self.asked += [[str(argument) for argument in request.args] for request in requests]
        self._lm.check(requests)
        return [answer] * len(requests)

    generate_until = functools.partialmethod(_answer, answer="")
    loglikelihood = functools.partialmethod(_answer, answer=(0.0, False))
    loglikelihood_rolling = functools.partialmethod(_answer, answer=0.0)


def check_requests(lm: EvaluatedModel, plan: Plan, tasks: Sequence[Task | Group]) -> str:
    """Runs lm_eval on empty answers, so that failures come before any decoding; returns a digest of all requests.

    Only the shapes of the weights are needed. Raises UserError if the model cannot serve a request, or the kernel does
    not support the sandbox.
    """
    rehearsal = _Rehearsal(lm := _with_settings(lm, tasks))
    for some in tasks:
        try:
            _ask(lm, plan, [some], rehearsal)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # a task file is a program
            name = some.name if isinstance(some, Group) else some.config.task
            raise UserError(f"{plan.flags}tasks={name}: it cannot be run: {_reason(error)}") from error
    return key_of(rehearsal.asked)


def _with_settings(lm: EvaluatedModel, tasks: Sequence[Task | Group]) -> EvaluatedModel:
    """The model, not asked anything yet, with the decode settings in the metadata of the tasks' files."""
    metadata = {task.config.task: task.config.metadata for task in members(tasks)}
    own = {name: some.get("decode", {}) for name, some in metadata.items() if isinstance(some, dict)}
    return dataclasses.replace(lm, task_settings=own)


def _ask(lm: EvaluatedModel, plan: Plan, tasks: Sequence[Task | Group], rehearsal: LM | None = None) -> dict[str, Any]:
    """The results of lm_eval. A `rehearsal` is asked in place of the model, and then no generated code is run."""
    executes = any(getattr(task, "UNSAFE_CODE", False) for task in members(tasks))
    with sandbox.allow(plan.unsafe, rehearsal is not None) if executes else contextlib.nullcontext():
        return lm_eval.simple_evaluate(
            model=rehearsal or lm,
            tasks=list(tasks),
            limit=plan.limit,
            num_fewshot=plan.num_fewshot,
            apply_chat_template=lm.chat,
            confirm_run_unsafe_code=plan.allow_code_execution,
            task_manager=TaskManager(include_path=[PINNED], include_defaults=False),  # the default takes seconds
            bootstrap_iters=0 if rehearsal else 1000,
        )


def run_tasks(lm: EvaluatedModel, plan: Plan, tasks: Sequence[Task | Group]) -> dict[str, Any]:
    """The results of lm_eval, with `samples`, and the cost of decoding as `decoding`; UserError as `check_requests`."""
    results = _ask(lm := _with_settings(lm, tasks), plan, tasks)
    for name, samples in results["samples"].items():
        for sample in samples:
            sample["decoding"] = [
                {key: value for key, value in lm.known[asked.key].items() if key != "text"}
                for asked in lm.asked[name][sample["doc_id"]]
            ]
    asked = {name: sum(of_doc.values(), []) for name, of_doc in lm.asked.items()}
    results["decoding"] = summarize(sum(asked.values(), []), lm)
    results["decoding"]["tasks"] = {name: summarize(some, lm) for name, some in asked.items() if some}
    how = {"chat": lm.chat, "thinking": lm.thinking}
    results["settings"] = {
        name: how | (dataclasses.asdict(some[0].request.settings) if some else {}) for name, some in asked.items()
    }
    versions = {package: importlib.metadata.version(package) for package in ("lm_eval", "datasets", "jax")}
    return results | {"packages": versions | {"refusion-jax": refusion_jax.__version__}}


def summarize(samples: list[Sample], lm: EvaluatedModel) -> dict[str, Any]:
    """Speed and length of some decoded samples. Seconds are those of the slowest host, without compilation."""
    if not samples:
        return {"samples": 0}
    records = [lm.known[sample.key] for sample in samples]
    tokens, forwards = (sum(record[name] for record in records) for name in ("tokens", "forwards"))
    hosts = {record["host"] for record in records}
    seconds = max(sum(r["seconds"] for r in records if r["host"] == host) for host in hosts)
    return {
        "samples": len(records),
        "resumed": sum(sample.key in lm.known_before for sample in samples),
        "tokens_per_second": tokens / seconds if seconds else None,
        "tokens_per_forward": tokens / forwards if forwards else None,
        "mean_tokens": tokens / len(records),
        "forwards": forwards,
        "seconds": seconds,
        "truncated_share": sum(record["finish_reason"] == "length" for record in records) / len(records),
        "cut_prompts": sum(record["is_cut"] for record in records),
    }
