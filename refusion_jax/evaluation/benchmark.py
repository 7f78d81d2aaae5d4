"""Runs tasks of lm_eval (its own, the pinned ones, and the user's) and summarizes the cost of decoding."""

import collections
import contextlib
import dataclasses
import difflib
import importlib.metadata
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import lm_eval.api.model
import lm_eval.api.task
import lm_eval.utils
from lm_eval.api.group import Group
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Kind
from lm_eval.tasks._yaml_loader import load_yaml  # lm_eval's version is pinned

from refusion_jax.cli.errors import UserError
from refusion_jax.evaluation import sandbox
from refusion_jax.evaluation.harness import EvaluatedModel, key_of

PINNED = Path(__file__).parent / "tasks"
# Its progress bars would break up the log of a training run.
lm_eval.api.task.tqdm = lm_eval.api.model.tqdm = lambda items, **_: items
_REPEATS = 10_000  # answers to one problem
_SEED = 1234  # for choosing few-shot examples; lm_eval's default


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to evaluate."""

    tasks: Sequence[str]
    include_path: Path | None = None  # the user's task files; they override the pinned ones, which override lm_eval's
    task_data: Path | None = None  # a file TASK.jsonl in it replaces the download of the task's data
    limit: int | None = None  # only the first so many problems of each task
    num_fewshot: int | None = None  # few-shot examples, for tasks that have any
    allow_code_execution: bool = False
    unsafe: bool = False  # run generated code without the sandbox
    flags: str = "--"  # prefix of the flags, for error messages


_SAID: collections.deque[str] = collections.deque(maxlen=3)  # errors that lm_eval has logged


class _Kept(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Keeps what lm_eval logs of an error, since what it then raises often says nothing."""
        _SAID.append(record.getMessage())


def _reason(error: BaseException) -> str:
    """Why a task cannot be used, in one line."""
    said = " ".join([*_SAID, str(error.__cause__ or error)]).split()
    return f"{type(error).__name__}: {' '.join(said)[:300]}"


class Tasks(list[lm_eval.api.task.Task]):
    """Tasks, each once, and the groups that combine their scores."""

    def __init__(self, loaded: Sequence[tuple[list[lm_eval.api.task.Task], Group | None]]):
        by_name, self.groups = {}, []
        for tasks, group in sorted(loaded, key=lambda some: some[1] is None):  # groups first, with tasks of their own
            own = {task.config.task: task for task in tasks}
            if group and not own.keys() & by_name.keys():  # lm_eval refuses groups that share a task
                self.groups.append(group)
            by_name = by_name | own | by_name  # the first of two
        super().__init__(by_name.values())


def load_tasks(plan: Plan) -> Tasks:
    """The tasks, with their data.

    Raises:
      UserError: where a task is unknown, its data cannot be loaded, or a flag it needs is missing.
    """
    _SAID.clear()
    logger = logging.getLogger("lm_eval")
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logger.handlers = [_Kept()]
    for library in ("datasets", "huggingface_hub"):  # say line after line what they then raise
        logging.getLogger(library).setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    paths = [PINNED, *([plan.include_path] if plan.include_path else [])]
    try:
        manager = TaskManager(include_path=paths, include_defaults=False)
        if not all(name in manager.all_tasks for name in plan.tasks):
            manager = TaskManager(include_path=paths)  # takes seconds, as lm_eval has thousands of files
    except Exception as error:  # files of tasks hold anything
        raise UserError(
            f"{plan.flags}include_path={plan.include_path}: cannot be searched for tasks: {_reason(error)}"
        ) from error
    tasks = Tasks([_load(manager, name, plan) for name in plan.tasks])
    if plan.task_data and not any(_local_file(task.config.task, plan) for task in tasks):
        needed = ", ".join(f"{task.config.task}.jsonl" for task in tasks[:3])
        raise UserError(f"{plan.flags}task_data={plan.task_data}: no task here reads a file of it; they read {needed}")
    for task in tasks:
        _check(task, plan)
    return tasks


def _load(manager: TaskManager, name: str, plan: Plan) -> tuple[list[lm_eval.api.task.Task], Group | None]:
    if name not in manager.all_tasks:
        close = difflib.get_close_matches(name, manager.all_tasks, n=3)
        other = f"{plan.flags}include_path=DIR names a directory of task files"
        hint = f"did you mean {' or '.join(close)}?" if close else other
        raise UserError(f"{plan.flags}tasks={name}: no such task; {hint}")
    try:
        _read_locally(manager, plan)
        loaded = manager.load([name])
        return list(loaded["tasks"].values()), loaded["groups"].get(name)
    except (Exception, SystemExit) as error:  # datasets, the hub and task files raise whatever they like
        file = f"DIR/{name if name in manager.all_subtasks else 'TASK'}.jsonl"
        raise UserError(
            f"{plan.flags}tasks={name}: it cannot be loaded: {_reason(error)}; if its data cannot be "
            f"downloaded here, put it into {file} and give {plan.flags}task_data=DIR"
        ) from error


def _read_locally(manager: TaskManager, plan: Plan) -> None:
    """Has the manager load tasks with the user's data, by themselves or as members of a group."""
    for name in (path.stem for path in plan.task_data.glob("*.jsonl")) if plan.task_data else ():
        entry = manager.task_index.get(name)
        if entry and entry.kind == Kind.TASK and entry.yaml_path:
            local = {"dataset_path": "json", "dataset_name": None, "custom_dataset": None}
            local |= {"dataset_kwargs": {"data_files": {"test": str(_local_file(name, plan))}}, "test_split": "test"}
            config = load_yaml(entry.yaml_path) | local
            manager.task_index[name] = dataclasses.replace(entry, yaml_path=None, cfg=config)


def _local_file(task: str, plan: Plan) -> Path | None:
    """The file with the data of a task, if there is one."""
    file = plan.task_data and (plan.task_data / f"{task}.jsonl").absolute()
    return file if file and file.exists() else None


def _check(task: lm_eval.api.task.Task, plan: Plan) -> None:
    name, metadata = task.config.task, task.config.metadata or {}
    if plan.num_fewshot and task.config.num_fewshot == 0:
        raise UserError(f"--num_fewshot={plan.num_fewshot}: {name} is a task without examples; leave the flag out")
    if not (type(task.config.repeats) is int and 1 <= task.config.repeats <= _REPEATS):
        shown = str(task.config.repeats)[:60]
        raise UserError(f"{plan.flags}tasks={name}: repeats={shown} must be a number from 1 to {_REPEATS}")
    if not getattr(task, "UNSAFE_CODE", False):
        return
    if not plan.allow_code_execution:
        leave = f"{plan.flags}allow_code_execution"
        raise UserError(f"{plan.flags}tasks={name} runs code that the model writes: give {leave} to let it")
    if not (isinstance(metadata, dict) and metadata.get("sandboxed")) and not plan.unsafe:
        raise UserError(
            f"{plan.flags}tasks={name} runs generated code by itself, without shutting it in: take humaneval or mbpp, "
            f"which do; only `evaluate` runs it nevertheless, with --unsafe"
        )


def check_requests(lm: EvaluatedModel, plan: Plan, tasks: list[lm_eval.api.task.Task]) -> str:
    """Checks all requests of the tasks before anything is decoded; only the shapes of the weights are needed.

    Returns:
      A digest of all requests.

    Raises:
      UserError: where the model cannot serve a request, or the kernel does not support the sandbox.
    """
    _learn_settings(lm, tasks)
    everything = []
    with _executing(tasks, plan):
        for task in tasks:
            if plan.num_fewshot is not None and task.config.num_fewshot != 0:
                task.set_config("num_fewshot", plan.num_fewshot)
            task.set_fewshot_seed(seed=_SEED)
            try:
                task.build_all_requests(
                    limit=plan.limit,
                    apply_chat_template=lm.chat,
                    fewshot_as_multiturn=True,
                    chat_template=lm.apply_chat_template if lm.chat else None,
                )
                everything += [[str(argument) for argument in instance.args] for instance in task.instances]
                lm.check(task.instances)
                _check_scoring(task)
            except UserError:
                raise
            except (Exception, SystemExit) as error:  # a task file is a program of its own
                raise UserError(
                    f"{plan.flags}tasks={task.config.task}: it cannot be asked: {_reason(error)}"
                ) from error
    return key_of(everything)


def _check_scoring(task: lm_eval.api.task.Task) -> None:
    """Tries on empty answers what is done only when everything is decoded: filters, and the targets of problems."""
    if not callable(task.config.process_results):
        for instance in task.instances:
            task.doc_to_target(instance.doc)
        for metric, function in getattr(task, "_metric_fn_list", {}).items():
            if function is None:
                raise ValueError(f"there is no metric {metric}")
    for instance in task.instances:
        instance.resps = [""] * instance.repeats
    if task.OUTPUT_TYPE == "generate_until":
        task.apply_filters()
        if not callable(task.config.process_results):
            _check_metrics(task)
    for instance in task.instances:
        instance.resps, instance.filtered_resps = [], {}


def _check_metrics(task: lm_eval.api.task.Task) -> None:
    """Tries the metrics on filtered empty answers: some are for answers of another kind, which shows in their sum."""
    some = task.instances[:2]
    for name in some[0].filtered_resps if some else ():
        scores = [task.process_results(instance.doc, [instance.filtered_resps[name]]) for instance in some]
        for metric, aggregate in task.aggregation().items():
            aggregate([score[metric] for score in scores])


def _learn_settings(lm: EvaluatedModel, tasks: list[lm_eval.api.task.Task]) -> None:
    for task in tasks:
        metadata = task.config.metadata or {}
        lm.task_settings[task.config.task] = metadata.get("decode", {}) if isinstance(metadata, dict) else {}


def _executing(tasks: list[lm_eval.api.task.Task], plan: Plan) -> contextlib.AbstractContextManager:
    """A context in which tasks may run generated code, if any of them does."""
    executes = any(getattr(task, "UNSAFE_CODE", False) for task in tasks)
    return sandbox.allow(plan.unsafe) if executes else contextlib.nullcontext()


def run_tasks(lm: EvaluatedModel, plan: Plan, tasks: Tasks) -> dict[str, Any]:
    """The results of lm_eval, with `samples`, and with the cost of decoding as `decoding`.

    Raises:
      UserError: where the model cannot serve a request.
    """
    _learn_settings(lm, tasks)
    with _executing(tasks, plan):
        results = lm_eval.simple_evaluate(
            model=lm,
            tasks=_with_groups(tasks),
            limit=plan.limit,
            num_fewshot=plan.num_fewshot,
            apply_chat_template=lm.chat,
            confirm_run_unsafe_code=plan.allow_code_execution,
            task_manager=TaskManager(include_path=[PINNED], include_defaults=False),
            bootstrap_iters=1000,
            fewshot_random_seed=_SEED,
        )
    asked = {task.config.task: _asked(lm, task) for task in tasks}
    for name, samples in results["samples"].items():
        for sample in samples:
            sample["decoding"] = [
                {key: value for key, value in lm.known[key].items() if key != "text"}
                for key in asked[name].get(sample["doc_id"], [])
            ]
    keys = {name: [key for some in of_doc.values() for key in some] for name, of_doc in asked.items()}
    results["decoding"] = summarize(sum(keys.values(), []), lm)
    results["decoding"]["tasks"] = {name: summarize(some, lm) for name, some in keys.items() if some}
    results["settings"] = {task.config.task: _settings_of(lm, task) for task in tasks}
    results["packages"] = {package: _version(package) for package in ("lm_eval", "datasets", "jax", "refusion-jax")}
    return results


def _version(package: str) -> str | None:
    """Of a package; None for a checkout of ours that is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _with_groups(tasks: Tasks) -> list[lm_eval.api.task.Task | Group]:
    """What lm_eval is to run: the groups, whose scores it then combines, and the tasks that are in none."""
    inside = {task.config.task for group in tasks.groups for task in group.get_all_tasks()}
    return [*tasks.groups, *(task for task in tasks if task.config.task not in inside)]


def _asked(lm: EvaluatedModel, task: lm_eval.api.task.Task) -> dict[int, list[str]]:
    """The journal keys of a task's samples, by problem number."""
    keys: dict[int, list[str]] = {}
    requests = [i for i in task.instances if i.request_type == "generate_until" for _ in range(i.repeats)]
    for request, sample in zip(requests, lm.samples(requests), strict=True):
        keys.setdefault(request.doc_id, []).append(sample.key)
    return keys


def _settings_of(lm: EvaluatedModel, task: lm_eval.api.task.Task) -> dict[str, Any]:
    """The decode settings of a task's first problem."""
    requests = [i for i in task.instances if i.request_type == "generate_until"][:1]
    how = {"chat": lm.chat, "thinking": lm.thinking}
    return how | (dataclasses.asdict(lm.samples(requests)[0].settings) if requests else {})


def summarize(keys: list[str], lm: EvaluatedModel) -> dict[str, Any]:
    """Speed and length of some decoded samples. Seconds are those of the slowest host, without compilation."""
    if not keys:
        return {"samples": 0}
    records = [lm.known[key] for key in keys]
    tokens, forwards = (sum(record[name] for record in records) for name in ("tokens", "forwards"))
    hosts = {record["host"] for record in records}
    seconds = max(sum(r["seconds"] for r in records if r["host"] == host) for host in hosts)
    return {
        "samples": len(records),
        "resumed": sum(key in lm.known_before for key in keys),
        "tokens_per_second": tokens / seconds if seconds else None,
        "tokens_per_forward": tokens / forwards if forwards else None,
        "mean_tokens": tokens / len(records),
        "forwards": forwards,
        "seconds": seconds,
        "truncated_share": sum(record["finish_reason"] == "length" for record in records) / len(records),
        "cut_prompts": sum(record["is_cut"] for record in records),
    }
