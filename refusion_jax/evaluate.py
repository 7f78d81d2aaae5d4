"""Measures how good a trained model is: with tasks of lm-evaluation-harness, decoded by our decoders.

  python -m refusion_jax.evaluate --checkpoint=runs/mine --tasks=gsm8k,humaneval --output=results/mine
  python -m refusion_jax.evaluate --checkpoint=runs/mine --tasks=my_task --include_path=my_tasks --output=results/mine

Tasks are those of lm_eval, your own task files in --include_path, and the seven benchmarks of the ReFusion paper with
the authors' prompts and settings: gsm8k, math, humaneval, mbpp, mmlu_pro, arc_c and gpqa (their files are in
refusion_jax/evaluation/tasks). They download their data, or take DIR/TASK.jsonl of --task_data=DIR.

DIR (the --output) will hold results.json (lm_eval's, with `decoding`: tokens_per_second, tokens_per_forward,
mean_tokens, forwards, truncated_share), samples_TASK.jsonl (every prompt, answer and score) and journal/: run the same
command again after it was killed, and no finished sample is decoded again.

How to decode: what a flag --decode.NAME says, or else the request of the task (max_gen_toks, temperature), or else
`decode` in the metadata of the task's file.
"""

import json
import sys
from pathlib import Path

import jax
from absl import flags
from etils import epath

from refusion_jax.decoding.settings import METHODS, DecodeSettings
from refusion_jax.model.huggingface import is_huggingface
from refusion_jax.runtime import cli
from refusion_jax.runtime.distributed import together
from refusion_jax.runtime.errors import UserError
from refusion_jax.runtime.sharding import MESH_AXES, make_mesh
from refusion_jax.runtime.storage import is_remote
from refusion_jax.training.checkpoints import find_step
from refusion_jax.training.pretrained import choose_method, load_model, load_tokenizer
from refusion_jax.training.workdir import write_file

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A training run's directory, or one step in its checkpoints/")
_TASKS = flags.DEFINE_list("tasks", None, "Names of tasks, with commas between")
_OUTPUT = flags.DEFINE_string("output", None, "Directory of the results: made, or continued")
_INCLUDE = flags.DEFINE_string("include_path", None, "Directory of task files of your own (lm_eval's YAML)")
_TASK_DATA = flags.DEFINE_string("task_data", None, "Directory with TASK.jsonl, in place of what TASK downloads")
_LIMIT = flags.DEFINE_integer("limit", None, "Only the first so many problems of each task", lower_bound=1)
_FEWSHOT = flags.DEFINE_integer("num_fewshot", None, "Worked examples before each problem", lower_bound=0)
_CHAT = flags.DEFINE_bool("chat", None, "Render prompts by the tokenizer's chat template; by default if it has one")
_THINKING = flags.DEFINE_bool("thinking", False, "With a chat template: answers may begin with thinking (the authors')")
_EXECUTE = flags.DEFINE_bool("allow_code_execution", False, "Run code that the model writes, shut in")
_UNSAFE = flags.DEFINE_bool(
    "unsafe", False, "Run it without namespaces, where the kernel has none: it can read and write whatever you can"
)
_ORDER = flags.DEFINE_enum("order", "left_to_right", ["left_to_right", "random"], "Of slots, for the likelihood")
_ORDERS = flags.DEFINE_integer("orders", 1, "Random orders to average over", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of weights, cache and computation")
_DATA = flags.DEFINE_integer("mesh.data", 1, "Split the batch over this many devices of a host", lower_bound=1)
_TENSOR = flags.DEFINE_integer("mesh.tensor", 1, "Split heads and weights over this many devices", lower_bound=1)
_METHOD = flags.DEFINE_enum("decode.method", None, METHODS, "How; by default what the model was trained for")
_SETTINGS = cli.define_settings(DecodeSettings, "decode", but="method")


def main() -> None:
    if not (_CHECKPOINT.value and _OUTPUT.value and _TASKS.value):
        raise UserError("--checkpoint=DIR, --tasks=A,B and --output=DIR are needed; --help explains")
    output = Path(_OUTPUT.value)
    if is_remote(output):
        raise UserError(f"--output={output}: must be a local directory; copy it when it is done")
    cli.check_output("output", output, directory=True)
    with together():
        results = evaluate(epath.Path(_CHECKPOINT.value), output)
        if jax.process_index() == 0:
            write_results(output, results)


def evaluate(checkpoint: epath.Path, output: Path) -> dict:
    """Runs the tasks that the flags name."""
    try:
        from refusion_jax.evaluation import benchmark, harness, journal
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'refusion-jax[evaluate]'") from error
    include, data = (value and Path(value) for value in (_INCLUDE.value, _TASK_DATA.value))
    for name, path in (("include_path", include), ("task_data", data)):
        if path and not path.is_dir():
            raise UserError(f"--{name}={path} is no directory")
    plan = benchmark.Plan(
        tasks=_TASKS.value,
        include_path=include,
        task_data=data,
        limit=_LIMIT.value,
        num_fewshot=_FEWSHOT.value,
        allow_code_execution=_EXECUTE.value or _UNSAFE.value,
        unsafe=_UNSAFE.value,
    )
    method, tokenizer = choose_method(checkpoint, _METHOD.value), load_tokenizer(checkpoint)
    has_template = getattr(tokenizer, "has_chat_template", False)
    if _CHAT.value and not has_template:
        raise UserError(f"--chat: the tokenizer of {checkpoint} has no chat template")
    asked = {name: flag.value for name, flag in _SETTINGS.items() if flag.present}
    DecodeSettings(method, **asked)
    tasks = benchmark.load_tasks(plan)
    split = {"data": _DATA.value, "tensor": _TENSOR.value}
    devices = jax.local_devices()[: _DATA.value * _TENSOR.value]
    lm = harness.EvaluatedModel(
        load_model(checkpoint, _DTYPE.value, make_mesh(dict.fromkeys(MESH_AXES, 1) | split, devices)),
        tokenizer,
        journal.Journal(output / "journal", jax.process_index()),
        name=str(checkpoint if is_huggingface(checkpoint) else find_step(checkpoint)[1]),
        method=method,
        flags=asked,
        chat=has_template if _CHAT.value is None else _CHAT.value,
        thinking=_THINKING.value,
        order=_ORDER.value,
        orders=_ORDERS.value,
    )
    results = benchmark.run_tasks(lm, plan, tasks)
    results["settings"]["command"] = sys.argv[1:]
    return results


def write_results(output: Path, results: dict) -> None:
    """results.json and samples_TASK.jsonl, and the scores on the terminal."""

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
        print(
            f"{d['samples']} samples, {d['resumed']} of them decoded before; {rate:,.0f} tokens/s, "
            f"{d['tokens_per_forward']:.2f} tokens a forward, {d['mean_tokens']:.0f} tokens each, "
            f"{d['truncated_share']:.1%} cut at their longest"
        )
    print(f"{output}/results.json")


if __name__ == "__main__":
    cli.run(main)
