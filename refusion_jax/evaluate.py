"""Measures how good a trained model is: tasks of lm-evaluation-harness with our decoders, or the likelihood of data.

  python -m refusion_jax.evaluate --checkpoint=runs/mine --tasks=gsm8k,arc_c --output=results/mine
  python -m refusion_jax.evaluate --checkpoint=runs/mine --tasks=humaneval --output=results/code --allow_code_execution
  python -m refusion_jax.evaluate --checkpoint=runs/mine --tasks=my_task --include_path=my_tasks --output=results/own

  python -m refusion_jax.evaluate --checkpoint=runs/mine --data=prepared/mine/held_out --output=results/held_out

Tasks are those of lm_eval, your own task files in --include_path, and the seven benchmarks of the ReFusion paper with
the authors' prompts and decode settings: gsm8k, math, humaneval, mbpp, mmlu_pro, arc_c and gpqa (their files are in
refusion_jax/evaluation/tasks). Their data are downloaded, or taken from DIR/TASK.jsonl of --task_data=DIR.

DIR (the --output) will hold results.json (lm_eval's, with `decoding`: tokens_per_second, tokens_per_forward,
mean_tokens, forwards, truncated_share), samples_TASK.jsonl (every prompt, answer and score) and journal/: after a kill,
the same command resumes without decoding a finished sample again. Its results.json is that of the last command.

With --data, results.json holds `held_out`: the loss and its terms, with the same noise as evaluations during training
(for models that were trained here), and eval_bits_per_byte: the likelihood of all responses, given their prompts, in
bits per byte of their text. It is exact for left-to-right models, and for slots in one order or as the mean over random
orders. For masked diffusion it is a Monte Carlo bound, marked by eval_bits_per_byte_is_bound, with its standard error.
For systems without a known likelihood there are only the losses. A text longer than a row counts as several `segments`.

Several processes split the problems, or the texts of --data, and write what one would:

  COMMAND=evaluate bash launch/local_hosts.sh 4 --checkpoint=runs/mine --tasks=gsm8k --output=results/mine

A decode setting comes from its flag --decode.NAME, or else from the task's request (max_gen_toks, temperature), or else
from `decode` in the metadata of the task's file.
"""

import json
import signal
import sys
from pathlib import Path

import jax
import numpy as np
from absl import flags
from etils import epath

from refusion_jax.checkpoints.contents import (
    choose_method,
    copy_stamp,
    load_tokenizer,
    locate,
    read_model_config,
    weights_stamp,
)
from refusion_jax.checkpoints.load import load_for, load_model
from refusion_jax.cli import command, flag_values
from refusion_jax.cli.errors import UserError, needs
from refusion_jax.cli.progress import waiting
from refusion_jax.config.run_config import read_config
from refusion_jax.data.fast_tokenizer import tokenizer_hash
from refusion_jax.data.manifest import is_prepared
from refusion_jax.data.prepared import PreparedRows
from refusion_jax.distributed.processes import check_same, together
from refusion_jax.distributed.sharding import local_mesh
from refusion_jax.distributed.storage import write_file
from refusion_jax.evaluation import heldout
from refusion_jax.evaluation.likelihood import held_out_bits, longest_scored, spread
from refusion_jax.systems.api import all_settings, own_settings
from refusion_jax.systems.registry import system_of

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, command.CHECKPOINT)
_TASKS = flags.DEFINE_list("tasks", None, "Names of tasks, comma-separated", allow_overwrite=False)
_PREPARED = flags.DEFINE_string("data", None, "Instead of --tasks: score a directory that `prepare` wrote")
_OUTPUT = flags.DEFINE_string("output", None, "Directory for the results: created or continued")
_INCLUDE = flags.DEFINE_string("include_path", None, "Directory of task files of your own (lm_eval's YAML)")
_TASK_DATA = flags.DEFINE_string("task_data", None, "Directory with TASK.jsonl, used in place of TASK's download")
_LIMIT = flags.DEFINE_integer(
    "limit",
    None,
    "Only this many problems of each task, from the first on, or rows of --data, evenly spaced",
    lower_bound=1,
)
_FEWSHOT = flags.DEFINE_integer("num_fewshot", None, "Worked examples before each problem", lower_bound=0)
_CHAT = flags.DEFINE_bool("chat", None, "Render prompts with the tokenizer's chat template; by default if it has one")
_THINKING = flags.DEFINE_bool(
    "thinking", None, "With a chat template: whether answers may begin with thinking; by default as in training"
)
_EXECUTE = flags.DEFINE_bool("allow_code_execution", False, "Run code that the model writes, in the sandbox")
_UNSAFE = flags.DEFINE_bool(
    "unsafe", False, "Run that code even if the kernel cannot isolate it: it can then read and write whatever you can"
)
_ORDER = flags.DEFINE_enum("order", "left_to_right", ["left_to_right", "random"], "Order of slots for the likelihood")
_DRAWS = flags.DEFINE_integer(
    "draws", 0, "Random orders, or draws of a likelihood bound, to average over; 0: 1 order or 64 draws", 0, 100_000
)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of weights, cache and computation")
_DATA = flags.DEFINE_integer("mesh.data", 1, "Split the batch over this many devices of a host", lower_bound=1)
_TENSOR = flags.DEFINE_integer("mesh.tensor", 1, "Split heads and weights over this many devices", lower_bound=1)
command.define_settings(all_settings(), defaults={"max_new_tokens": "the task's, or 256"})
_OF_TASKS = (_INCLUDE, _TASK_DATA, _FEWSHOT, _CHAT, _THINKING, _EXECUTE, _UNSAFE)
_OF_SCORING = ("method", "weights", "slot_size", "seed")  # decode settings that the likelihood has, too


def main() -> None:
    if not (_CHECKPOINT.value and _OUTPUT.value) or bool(_TASKS.value) == bool(_PREPARED.value):
        raise UserError(
            "--checkpoint=DIR, --output=DIR and one of --tasks=A,B and --data=DIR are needed; --help explains"
        )
    output = Path(_OUTPUT.value)
    flag_values.check_output("output", output, directory=True)
    checkpoint = locate(epath.Path(_CHECKPOINT.value)).path
    with together():
        check_same("the newest step of --checkpoint (name one: DIR/checkpoints/STEP)", checkpoint.name)
        # JAX, which is in use now, handles it in several processes, for training to save.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if jax.process_count() > 1:
            check_same(f"the model in --checkpoint={checkpoint}", copy_stamp(checkpoint))
        results = measure(checkpoint, _PREPARED.value) if _PREPARED.value else evaluate(checkpoint, output)
        if jax.process_index():
            return
        if _PREPARED.value:
            print("\n".join(f"{name}  {value}" for name, value in results.items()))  # even if the disk is full
            whole = {"held_out": results, "settings": {"command": sys.argv[1:]}}
            write_file(output / "results.json", json.dumps(whole, indent=2) + "\n")
        else:
            write_results(output, results)


def measure(checkpoint: epath.Path, data: str) -> dict:
    """The held-out loss of prepared data if the model was trained by us, and its bits per byte if known."""
    if not is_prepared(data):
        raise UserError(f"--data={data}: is not a directory that `prepare` wrote")
    useless = [flag.name for flag in _OF_TASKS if flag.present]
    useless += [f"decode.{name}" for name in command.given() if name not in _OF_SCORING]
    if useless:
        raise UserError(f"--{useless[0]}: cannot be used with --data, whose text is scored, not decoded")
    method, tokenizer = choose_method(checkpoint, command.given().get("method")), load_tokenizer(checkpoint)
    run = locate(checkpoint).run
    has_likelihood = system_of(method).scoring is not None
    if not (run or has_likelihood):
        raise UserError(
            f"--data={data}: nothing can be measured on it: {checkpoint} was trained elsewhere, and the likelihood of "
            f"{system_of(method).name} models is not known"
        )
    rows = PreparedRows(data)
    if rows.manifest.tokenizer != tokenizer_hash(tokenizer):
        raise UserError(
            f"--data={data}: was made with another tokenizer than that of {checkpoint}; prepare it with that"
        )
    some = spread(min(len(rows), _LIMIT.value or len(rows)), len(rows))
    if has_likelihood:
        check_lengths(checkpoint, method, rows, some)
    mesh = local_mesh(data=_DATA.value, tensor=_TENSOR.value)
    model = load_model(checkpoint, _DTYPE.value, mesh, command.given().get("weights", "same"))
    measured = {}
    with waiting("scoring"):
        if run:
            config = read_config(run)
            config.update({"row_length": rows.row_length, "eval": {"rows": _LIMIT.value or 0}})
            measured |= heldout.evaluate_model(config, model, [rows])
        if has_likelihood:
            measured |= held_out_bits(model, tokenizer, (rows[i] for i in some), method=method, **_scoring())
    return measured


def check_lengths(checkpoint: epath.Path, method: str, rows: PreparedRows, some: list[int]) -> None:
    """Refuses texts in some of the rows that are longer than the model reads, before anything is measured."""
    most = longest_scored(read_model_config(checkpoint), method)
    for number in some if rows.row_length > most else ():
        if (longest := np.bincount(rows[number]["segment_ids"])[1:].max()) > most:
            raise UserError(
                f"--data={rows.path}: row {number} holds a text of {longest} tokens, and {checkpoint} reads {most}: "
                f"prepare it with --row_length={most}"
            )


def _scoring() -> dict:
    asked = {name: value for name, value in command.given().items() if name in ("slot_size", "seed")}
    return asked | {"order": _ORDER.value, "draws": _DRAWS.value}


def evaluate(checkpoint: epath.Path, output: Path) -> dict:
    """Runs the tasks that the flags name."""
    with needs("evaluate"):
        from refusion_jax.evaluation import benchmark, harness, hosts
    plan = benchmark.Plan(
        tasks=_TASKS.value,
        include_path=_INCLUDE.value and Path(_INCLUDE.value),
        task_data=_TASK_DATA.value and Path(_TASK_DATA.value),
        limit=_LIMIT.value,
        num_fewshot=_FEWSHOT.value,
        allow_code_execution=_EXECUTE.value or _UNSAFE.value,
        unsafe=_UNSAFE.value,
    )
    method, tokenizer = choose_method(checkpoint, command.given().get("method")), load_tokenizer(checkpoint)
    has_template = tokenizer.has_chat_template
    if _CHAT.value and not has_template:
        raise UserError(f"--chat: the tokenizer of {checkpoint} has no chat template")
    asked = {name: value for name, value in command.given().items() if name != "method"}
    settings = own_settings(method, asked)
    tasks = benchmark.load_tasks(plan)
    model = load_for(checkpoint, settings, _DTYPE.value, local_mesh(data=_DATA.value, tensor=_TENSOR.value))
    lm = harness.EvaluatedModel(
        model,
        tokenizer,
        name=str(checkpoint),
        method=method,
        flags=asked,
        fingerprint=harness.key_of(weights_stamp(checkpoint, settings), settings.weights, _DTYPE.value),
        journal=hosts.open_journal(output / "journal"),
        chat=has_template if _CHAT.value is None else _CHAT.value,
        thinking=_THINKING.value,
        scoring=_scoring(),
    )
    benchmark.check_requests(lm, plan, tasks)
    results = benchmark.run_tasks(lm, plan, tasks)
    results["settings"]["command"] = sys.argv[1:]
    return results


def write_results(output: Path, results: dict) -> None:
    """Writes results.json and samples_TASK.jsonl, and prints the scores."""

    def line(value: dict, indent: int | None = None) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=False, default=str) + "\n"

    for task, samples in results.pop("samples").items():
        write_file(output / f"samples_{task}.jsonl", "".join(map(line, samples)))
    write_file(output / "results.json", line(results, indent=2))
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float) and "stderr" not in name:
                error = metrics.get(name.replace(",", "_stderr,"))
                print(f"{task}  {name}  {value:.4f}" + (f" ± {error:.4f}" if isinstance(error, float) else ""))
    if rate := results["decoding"].get("tokens_per_second"):
        d = results["decoding"]
        # A prefill, which is not counted, may write all of a short answer.
        per_forward = f"{d['tokens_per_forward']:.2f} tokens per forward" if d["forwards"] else "no forwards"
        print(
            f"{d['samples']} samples, {d['resumed']} of them decoded before; {rate:,.0f} tokens/s, "
            f"{per_forward}, {d['mean_tokens']:.0f} tokens each, "
            f"{d['truncated_share']:.1%} cut at their longest"
        )
    print(f"{output}/results.json")


if __name__ == "__main__":
    command.run(main)
