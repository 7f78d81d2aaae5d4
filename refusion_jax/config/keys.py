"""Every config key: declared once, with its default, its meaning and the values it may have.

A system's own keys are declared with the system, and form a section.
"""

from refusion_jax.cli.errors import UserError
from refusion_jax.cli.settings import Setting
from refusion_jax.data import families
from refusion_jax.model import remat
from refusion_jax.model.families import FAMILIES
from refusion_jax.systems.registry import default_system, systems, trainable

_MOST_STEPS = 2**31 - 1  # steps are counted in int32
_WIDTHS = "float32 | bfloat16"


def _count(default: int, help: str, most: int = 2**24) -> Setting:
    return Setting(default, help, at_least=1, at_most=most)


def _from_0(default: float, help: str, most: float) -> Setting:
    return Setting(default, help, at_least=0, at_most=most)


def _one_of(choices: str, help: str) -> Setting:
    """One of several words, given as "last | all"; the first one is the default."""
    words = tuple(choices.split(" | "))
    return Setting(words[0], f"{choices}: {help}", choices=words)


def _axis(default: int, help: str) -> Setting:
    return Setting(default, help, at_most=2**20)


_TRAINING = {
    "seed": Setting(0, "seed of all randomness: initial weights, row order and noise", at_least=0, below=2**32),
    "steps": _count(1000, "optimizer steps", _MOST_STEPS),
    "epochs": _from_0(0.0, "passes over all rows, which set the number of steps; 0: train for `steps`", 1e6),
    "batch_size": _count(32, "rows per step, over all chips"),
    "row_length": _count(1024, "tokens per row; documents are packed into rows", 2**20),
    "init_from": Setting(
        "",
        "weights to start from: a Hugging Face directory or a run, whose shape replaces the defaults of model; empty: "
        "random",
    ),
    "learning_rate": Setting(3e-4, "peak learning rate", above=0, at_most=100),
    "schedule": _one_of("cosine | wsd | constant", "after the warm-up; wsd is stable, then decays"),
    "warmup_steps": _from_0(0, "linear warm-up from 0", _MOST_STEPS),
    "decay_steps": _from_0(0, "length of the final linear decay of wsd", _MOST_STEPS),
    "final_lr_ratio": _from_0(0.1, "final learning rate as a fraction of the peak (cosine, wsd)", 1),
    "optimizer": _one_of("adamw | adafactor | muon", "moments per weight: two, by rows and columns only, or one"),
    "moment_dtype": _one_of(_WIDTHS, "dtype of the first moment"),
    "weight_decay": _from_0(0.1, "on matrices only", 1000),
    "beta1": Setting(0.9, "decay of AdamW's first moment, also in muon's AdamW part", at_least=0, below=1),
    "beta2": Setting(0.95, "decay of AdamW's second moment, also in muon's AdamW part", at_least=0, below=1),
    "clip_norm": Setting(1.0, "global norm that gradients are clipped to", above=0, at_most=1e6),
    "accumulation": _count(1, "micro-batches per step: less memory, same result"),
    "remat": Setting("products", remat.HELP, choices=tuple(remat.REMAT_POLICIES)),
    "dtype": _one_of(_WIDTHS, "dtype of computation; weights, softmax and loss always stay float32"),
    "quantization": _one_of("none | int8 | fp8", "precision of the layers' products, and of their inputs' gradients"),
    "log_every": _count(10, "steps between logged metrics", _MOST_STEPS),
    "tracker": Setting(
        "tensorboard", "where else metrics go, comma-separated: tensorboard | wandb | trackio; empty: nowhere"
    ),
    "profile_steps": Setting((), "first and last step to profile for TensorBoard, such as (10,12)"),
    "debug_nans": Setting(False, "name the first weight, gradient or update that is not finite; slower"),
    "compilation_cache": _one_of(
        "own | shared | off",
        "own: your cache directory; shared: the run's directory, for all hosts (it holds code that is executed)",
    ),
}

_MESH = {
    "replica": _axis(1, "copies of the weights across slices, over the data-centre network"),
    "data": _axis(1, "copies of the weights inside a slice"),
    "fsdp": _axis(-1, "chips that weights and batch are split over; -1: all that remain"),
    "expert": _axis(1, "as fsdp, but layers with experts are split by whole experts"),
    "tensor": _axis(1, "chips that heads, MLP and vocabulary are split over"),
    "sequence": _axis(1, "chips that the tokens of each row are split over"),
}

_MODEL = {
    "hidden_size": _count(256, "width of the residual stream", 2**20),
    "num_hidden_layers": _count(4, "depth", 2**14),
    "num_attention_heads": _count(4, "query heads", 2**14),
    "num_key_value_heads": _count(2, "key/value heads; divides num_attention_heads", 2**14),
    "head_dim": _count(64, "size of a head", 2**14),
    "intermediate_size": _count(768, "width of the SwiGLU", 2**22),
    "vocab_size": _count(4096, "rows of the embedding; at least the tokenizer's vocabulary"),
    "rope_theta": Setting(1e4, "base of the rotary frequencies", above=0, at_most=1e12),
    "rms_norm_eps": Setting(1e-6, "epsilon of every RMSNorm", above=0, at_most=1),
    "tie_word_embeddings": Setting(False, "one matrix for embedding and output head"),
    "family": Setting(
        "qwen3", f"architecture, such as placement of norms and biases: {' | '.join(FAMILIES)}", choices=(*FAMILIES,)
    ),
    "rope_scaling": Setting(
        (),
        "(factor,), or for Llama 3: (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings); "
        "empty: none",
    ),
    "local_rope": Setting((), "for Gemma 3: (rope_theta of local layers, N): every Nth layer is global; or empty"),
    "query_pre_attn_scalar": _from_0(0, "scores are divided by its square root; 0: by that of head_dim", 2**20),
    "num_experts": _from_0(0, "experts per layer, in a family that has them", 2**14),
    "num_experts_per_tok": _from_0(0, "experts that each token is routed to", 2**7),
    "moe_intermediate_size": _from_0(0, "width of an expert's SwiGLU", 2**22),
    "norm_topk_prob": Setting(True, "normalize the weights of a token's experts to sum to 1"),
    "router_aux_loss_coef": _from_0(0.001, "weight of loss_router, which balances the load of experts; 0: off", 1e6),
    "first_k_dense_replace": _from_0(0, "number of first layers without experts", 2**14),
    "num_shared_experts": _from_0(0, "additional experts, as one MLP that every token goes through", 2**7),
    "n_group": _count(1, "groups that experts are divided into", 2**14),
    "topk_group": _count(1, "groups that a token chooses its experts from", 2**14),
    "routed_scaling_factor": Setting(1.0, "factor on the weights of a token's experts", above=0, at_most=1e6),
    "partial_rotary_factor": Setting(1.0, "fraction of each head that RoPE rotates", above=0, at_most=1),
    "no_rope_layer_interval": _from_0(0, "for SmolLM3: every Nth layer has no RoPE; 0: all have it", 2**15),
}

_LORA = {
    "rank": _from_0(0, "rank of LoRA adapters, trained in place of the weights of init_from; 0: none", 2**14),
    "alpha": Setting(16.0, "updates by adapters are scaled by alpha / rank", above=0, at_most=1e6),
    "targets": Setting(".*_proj", "pattern of the weights that get an adapter, among (q|k|v|o|gate|up|down)_proj"),
    "full": Setting("", "pattern of weights that are trained in full, such as embed_tokens|.*norm; empty: none"),
}

_DATA = {
    "path": Setting(
        "tasks",
        "tasks | families | stdlib | a file, glob or directory, also on gs://: .jsonl, .parquet, text ... | DIR or "
        "DIR,DIR of `prepare`; append :held_out to tasks, families or stdlib for a disjoint held-out set",
    ),
    "weights": Setting((), "relative weights of data.path's directories, such as (3,1); empty: by their rows"),
    "tokenizer": Setting(
        "",
        "a sentencepiece model or Hugging Face tokenizer.json; empty: that of prepared data, or a new one of "
        "model.vocab_size pieces, trained on the data",
    ),
    "mask_piece": Setting(
        "<mask>", "the tokenizer's piece that stands for a masked token; with init_from that model's, if it has one"
    ),
    "thinking": _one_of("unset | true | false", "`enable_thinking` of the chat template; the trained model keeps it"),
    "turns": _one_of("last | all", "which answers of a conversation are trained on; each sees the turns before it"),
    "query_field": Setting("", "JSON field of the prompt; empty: query, question or prompt, whichever is there"),
    "response_field": Setting("", "JSON field of the answer; empty: response, answer or completion"),
    "text_field": Setting("", "JSON field of a text without prompt; empty: text"),
    "on_error": _one_of("stop | skip", "on examples that are malformed or longer than a row; skip counts them"),
    "examples": _count(40_000, "how many problems to generate (path=tasks or families)", 10**7),
    "difficulty": _count(1, f"difficulty of the problems (path=families), 1 to {families.MOST}", families.MOST),
}

_EVAL = {
    "path": Setting(
        "", "held-out data, given as in data.path; empty: held_out of the prepared directories in data.path, if any"
    ),
    "every": _count(
        1000, "steps between evaluations of the held-out loss; the last step is always evaluated", _MOST_STEPS
    ),
    "rows": _from_0(256, "maximum number of rows to evaluate, evenly spaced; 0: all", 2**31 - 1),
    "tasks": Setting("", "tasks of `evaluate` to decode and score during training, comma-separated; empty: none"),
    "tasks_every": _count(1000, "steps between evaluations on tasks; the last step is always scored", _MOST_STEPS),
    "limit": _from_0(200, "problems of each task to use, from the first on; 0: all", 2**31 - 1),
    "include_path": Setting("", "directory of task files of your own (lm_eval's YAML)"),
    "task_data": Setting("", "directory with TASK.jsonl, used in place of TASK's download"),
    "decode": Setting("", "decode settings, such as 'slot_size=4 batch_size=32'; they override those of the tasks"),
    "allow_code_execution": Setting(False, "run code that the model writes, in the sandbox, for tasks that need it"),
}

_CHECKPOINT = {
    "every": _count(1000, "steps between checkpoints; the last step is always saved", _MOST_STEPS),
    "keep": _count(3, "number of newest checkpoints to keep", 10**6),
}

_GUARD = {
    "spike": Setting(
        0.0, "skip steps whose loss is above this many times its running mean, such as 3.0; 0: off", at_least=0
    ),
    "hang_minutes": Setting(
        5.0,
        "end the run, and print the stacks of all threads, when a step takes longer than this and ten times as long as "
        "each of the 32 before it; the first 32 and the scoring of eval.tasks may take six times as long; 0: never",
        at_least=0,
    ),
}


def keys() -> dict[str, Setting]:
    """The keys of training and of all systems, by dotted name, in the order of --help."""
    objective = Setting(default_system().name, f"the system to train: {' | '.join(trainable())}")
    sections = {"mesh": _MESH, "model": _MODEL, "lora": _LORA, "data": _DATA, "eval": _EVAL, "checkpoint": _CHECKPOINT}
    sections |= {"guard": _GUARD}
    for system in systems().values():
        if (name := system.section) in {*sections, *_TRAINING, "objective"}:
            raise UserError(f"system {system.name!r}: {name!r}, its config section, is the name of a shared key")
        sections |= {name: system.keys} if name else {}
    nested = {f"{section}.{name}": key for section, own in sections.items() for name, key in own.items()}
    return {"objective": objective} | _TRAINING | nested


def keys_of(objective: str) -> dict[str, Setting]:
    """The keys that matter to one system: the shared ones and its own."""
    others = {system.section for name, system in systems().items() if name != objective} - {""}
    return {name: key for name, key in keys().items() if name.split(".")[0] not in others}
