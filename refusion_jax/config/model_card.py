"""The model card of an export: a README.md that describes the run."""

import json

from etils import epath

from refusion_jax.config import default_config, flatten
from refusion_jax.config.run_config import read_config
from refusion_jax.distributed.append_log import read_log
from refusion_jax.systems.registry import systems


def model_card(workdir: epath.Path, step: int, name: str, form: str = "huggingface") -> str:
    """System, data, steps, settings and scores of a run at a step, in Markdown; `form` is that of `convert`."""
    config = read_config(workdir)
    own, defaults = (flatten(json.loads(c.to_json())) for c in (config, default_config()))
    settings = {key: value for key, value in own.items() if value != defaults.get(key)}
    scores = {}
    for record in read_log(workdir / "metrics.jsonl"):
        if record.get("step", 0) <= step:  # keeps the newest value of each
            scores |= {key: value for key, value in record.items() if key == "loss" or key.startswith("eval_")}
    theirs = "`transformers` knows its layers, and decodes it left to right."
    if form == "peft":
        theirs = "`peft` adds it to that model, which `transformers` then decodes left to right."
    elif config.objective in systems() and systems()[config.objective].custom_generate:
        theirs = (
            "so does `model.generate(input_ids=..., custom_generate=DIR, trust_remote_code=True)` of `transformers`, "
            "by the code in custom_generate/; without these two arguments it decodes left to right."
        )
    return "\n".join(
        [
            *("---", f"library_name: {'peft' if form == 'peft' else 'transformers'}", "---", f"# {name}", ""),
            f"Trained by refusion_jax with `objective={config.objective}` from {config.init_from or 'random weights'} "
            f"on `{config.data.path}`: {step} of {config.steps} steps of {config.batch_size} rows of "
            f"{config.row_length} tokens. `python -m refusion_jax.generate --checkpoint=DIR` decodes it as it was "
            f"trained; {theirs}",
            *_table("settings that are not defaults", settings),
            *_table("newest scores of training", scores),
        ]
    )


def _table(title: str, values: dict) -> list[str]:
    texts = {key: json.dumps(value).replace("|", "\\|") for key, value in sorted(values.items())}
    rows = [f"| `{key}` | {text} |" for key, text in texts.items()]
    return ["", f"| {title} | |", "| --- | --- |", *rows, ""] if rows else []
