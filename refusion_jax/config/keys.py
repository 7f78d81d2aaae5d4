"""Every config key: declared once, with its default, its meaning and the values it may have.

A system's own keys are declared in its room and stand in a section of their own.
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
    """One of some words, such as "last | all", of which the first is the default."""
    words = tuple(choices.split(" | "))
    return Setting(words[0], f"{choices}: {help}", choices=words)


def _axis(default: int, help: str) -> Setting:
    return Setting(default, help, at_most=2**20)


_TRAINING = {
    "seed": Setting(0, "seed of weights, order of rows and noise: of all randomness", at_least=0, below=2**32),
    "steps": _count(1000, "optimizer steps", _MOST_STEPS),
    "epochs": _from_0(0.0, "times that all rows are trained on, which sets steps; 0: as steps says", 1e6),
    "batch_size": _count(32, "rows per step, over all chips"),
    "row_length": _count(1024, "tokens per row; documents are packed into rows", 2**20),
    "init_from": Setting(
        "",
        "weights to start from, a Hugging Face directory or a run, whose shape counts where none is set; empty: random",
    ),
    "learning_rate": Setting(3e-4, "peak learning rate", above=0, at_most=100),
    "schedule": _one_of("cosine | wsd | constant", "after the warm-up; wsd is stable, then decays"),
    "warmup_steps": _from_0(0, "linear warm-up from 0", _MOST_STEPS),
    "decay_steps": _from_0(0, "length of the final linear decay of wsd", _MOST_STEPS),
    "final_lr_ratio": _from_0(0.1, "learning rate at the end over its peak (cosine, wsd)", 1),
    "optimizer": _one_of("adamw | adafactor | muon", "moments per weight: two, by rows and columns only, or one"),
    "moment_dtype": _one_of(_WIDTHS, "dtype of the first moment"),
    "weight_decay": _from_0(0.1, "on matrices only", 1000),
    "beta1": Setting(0.9, "decay of adamw's first moment, also in its part of muon", at_least=0, below=1),
    "beta2": Setting(0.95, "decay of adamw's second moment, also in its part of muon", at_least=0, below=1),
    "clip_norm": Setting(1.0, "gradients are scaled down to this global norm", above=0, at_most=1e6),
    "accumulation": _count(1, "micro-batches per step: less memory, same result"),
    "remat": Setting("products", remat.HELP, choices=tuple(remat.REMAT_POLICIES)),
    "dtype": _one_of(_WIDTHS, "dtype of computation; weights, softmax and loss are float32 always"),
    "quantization": _one_of("none | int8 | fp8", "precision of the layers' products, and of their inputs' gradients"),
    "log_every": _count(10, "steps between metrics", _MOST_STEPS),
    "tracker": Setting(
        "tensorboard", "where else metrics go, comma-separated: tensorboard | wandb | trackio; empty: nowhere"
    ),
    "profile_steps": Setting((), "first and last step to profile, such as (10,12); TensorBoard shows it"),
    "debug_nans": Setting(False, "name the first weight, gradient or update that is not finite; slower"),
    "compilation_cache": _one_of(
        "own | shared | off", "own: your cache directory; shared: DIR, for all hosts (it holds code that is executed)"
    ),
}

_MESH = {
    "replica": _axis(1, "copies of the whole over the data-centre network"),
    "data": _axis(1, "copies of the weights inside a slice"),
    "fsdp": _axis(-1, "weights and batch split over these chips; -1 takes all that are left"),
    "expert": _axis(1, "as fsdp, but layers with experts are split by whole ones"),
    "tensor": _axis(1, "heads, mlp and vocabulary split over these chips"),
    "sequence": _axis(1, "the tokens of each row are split over these chips"),
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
        "qwen3", f"where norms stand and which biases there are: {' | '.join(FAMILIES)}", choices=(*FAMILIES,)
    ),
    "rope_scaling": Setting(
        (),
        "(factor,), or of Llama 3: (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings); "
        "empty: none",
    ),
    "local_rope": Setting((), "for Gemma 3: (rope_theta of local layers, every how many-th layer is global); or empty"),
    "query_pre_attn_scalar": _from_0(0, "attention divides by its square root; 0: by that of head_dim", 2**20),
    "num_experts": _from_0(0, "experts of a layer, of a family that has them", 2**14),
    "num_experts_per_tok": _from_0(0, "experts that a token goes to", 2**7),
    "moe_intermediate_size": _from_0(0, "width of an expert's SwiGLU", 2**22),
    "norm_topk_prob": Setting(True, "the weights of a token's experts sum to 1"),
    "router_aux_loss_coef": _from_0(0.001, "weight of loss_router, which balances experts; 0: none", 1e6),
    "first_k_dense_replace": _from_0(0, "layers before the first with experts", 2**14),
    "num_shared_experts": _from_0(0, "more experts, as one MLP that every token goes through", 2**7),
    "n_group": _count(1, "groups of experts", 2**14),
    "topk_group": _count(1, "groups that a token chooses its experts from", 2**14),
    "routed_scaling_factor": Setting(1.0, "factor of the weights of a token's experts", above=0, at_most=1e6),
    "partial_rotary_factor": Setting(1.0, "the part of a head that RoPE rotates", above=0, at_most=1),
    "no_rope_layer_interval": _from_0(0, "for SmolLM3: every how many-th layer is without RoPE", 2**15),
}

_LORA = {
    "rank": _from_0(0, "rank of adapters (LoRA), trained in place of the weights of init_from; 0: none", 2**14),
    "alpha": Setting(16.0, "updates by adapters are scaled by alpha / rank", above=0, at_most=1e6),
    "targets": Setting(".*_proj", "pattern of the weights that get one: (q|k|v|o|gate|up|down)_proj"),
    "full": Setting("", "pattern of weights that are trained themselves, such as embed_tokens|.*norm; empty: none"),
}

_DATA = {
    "path": Setting(
        "tasks",
        "tasks | families | stdlib | a file or glob, also on gs://: .jsonl, .parquet, text ... | DIR or DIR,DIR of "
        "`prepare`; append :held_out to tasks, families or stdlib for a disjoint held-out set",
    ),
    "weights": Setting((), "share of each prepared directory in data.path, such as (3,1); empty: by their rows"),
    "tokenizer": Setting(
        "",
        "a sentencepiece model or Hugging Face tokenizer.json; empty: that of prepared data, or a new one of "
        "model.vocab_size pieces, trained on the data",
    ),
    "mask_piece": Setting("<mask>", "the tokenizer's piece that stands for a masked token"),
    "thinking": _one_of("unset | true | false", "`enable_thinking` of the chat template, of the trained model, too"),
    "turns": _one_of("last | all", "which answers of a conversation are trained on; each sees the turns before it"),
    "query_field": Setting("", "JSON field of the prompt; empty: query, question or prompt, what is there"),
    "response_field": Setting("", "JSON field of the answer; empty: response, answer or completion"),
    "text_field": Setting("", "JSON field of a text without prompt; empty: text"),
    "on_error": _one_of("stop | skip", "at examples that are malformed or longer than a row; skip counts them"),
    "examples": _count(40_000, "how many problems to generate (path=tasks or families)", 10**7),
    "difficulty": _count(1, f"of the problems of path=families, 1 to {families.MOST}", families.MOST),
}

_EVAL = {
    "path": Setting(
        "", "held-out data, as data.path; empty: held_out of the prepared directories in data.path, if there is any"
    ),
    "every": _count(
        1000, "steps between evaluations of the held-out loss; the last step is always evaluated", _MOST_STEPS
    ),
    "rows": _from_0(256, "rows evaluated, at most, evenly spaced; 0: all", 2**31 - 1),
    "tasks": Setting("", "tasks of `evaluate` to decode and score while training, with commas between; empty: none"),
    "tasks_every": _count(1000, "steps between evaluations on tasks; the last step is always scored", _MOST_STEPS),
    "limit": _from_0(200, "problems of each task, the first so many; 0: all", 2**31 - 1),
    "include_path": Setting("", "directory of task files of your own (lm_eval's YAML)"),
    "task_data": Setting("", "directory with TASK.jsonl, in place of what TASK downloads"),
    "decode": Setting("", "settings of decoding, such as 'slot_size=4 batch_size=32'; they override the tasks' own"),
    "allow_code_execution": Setting(False, "run code that the model writes, in the sandbox, for tasks that need it"),
}

_CHECKPOINT = {
    "every": _count(1000, "steps between checkpoints; the last step is always saved", _MOST_STEPS),
    "keep": _count(3, "newest checkpoints kept", 10**6),
    "failures": _count(3, "consecutive failed saves (a full disk) after which the run stops", 10**6),
}

_GUARD = {
    "spike": Setting(
        0.0, "skip steps whose loss is above this many times its running mean, such as 3.0; 0: none", at_least=0
    ),
    "skips": _count(10, "skipped steps in a row that roll the run back to its last checkpoint, and past their rows"),
    "rollbacks": _count(3, "roll-backs to one checkpoint after which the run stops"),
    "hang_minutes": Setting(
        5.0,
        "a step that takes longer, and ten times as long as each of the 32 before it, ends the run, with the stacks of "
        "all threads; the first 32, and answers to eval.tasks, may take six times as long; 0: never",
        at_least=0,
    ),
}


def keys() -> dict[str, Setting]:
    """The keys of training and of all systems, by dotted name, in the order of --help."""
    objective = Setting(default_system().name, f"the system that is trained: {' | '.join(trainable())}")
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
