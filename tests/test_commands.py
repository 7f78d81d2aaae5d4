"""Bad input to the real commands: one clear line, exit code 2, and nothing on disk changed."""

import json

import pytest
from conftest import TINY_RUN, refused, run
from helpers import config_of_mine

TRAIN = ["train", *TINY_RUN]
QUERY = json.dumps({"query": "Sort 3 1 2.", "response": "1 2 3"}) + "\n"


@pytest.fixture
def files(tmp_path, trained_run):
    """A directory of good and bad things; `{run}` and `{dir}` in flags stand for a trained run and this directory."""
    contents = {
        "good.jsonl": QUERY * 50,
        "malformed.jsonl": QUERY + QUERY + '{"query": \n',
        "raises.py": "def get_config():\n    return 1 / 0\n",
        "nothing.py": "def get_config():\n    return None\n",
        "old.py": "from refusion_jax.config import default_config\n\n\ndef get_config():\n    c = default_config()\n"
        "    c.learning_rte = 1.0\n    return c\n",
        "drafts.py": config_of_mine("dflash").replace('"section": "mine"', '"section": "own"'),
        "prompts.jsonl": '{"prompt": "Sort 3 1."}\n{"promt": "Sort 3 1."}\n',
        "blank.jsonl": "\n",
        "blank.txt": "\n\n",
        "many.jsonl": '{"prompt": "Sort 3 1."}\n' * 9,
        "gapless.jsonl": '{"template": ["Sort 3 1."]}\n',
        "seventeen.jsonl": '{"prompt": "Sort 3 1."}\n' * 17,
        "empty/config.json": (trained_run / "config.json").read_text(),
        "empty/metrics.jsonl": "",
        "taken/index.html": "<!doctype html>mine",
        "prepared/manifest.json": "",
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def contents(*directories):
    return {p: p.read_bytes() for d in directories for p in d.rglob("*") if p.is_file()} | {
        p: None for d in directories for p in d.rglob("*") if p.is_dir()
    }


NEW = "--workdir={dir}/new"
DATA = "--config.data.path={dir}/"
GENERATE = ["generate", "--checkpoint={run}", "--output={dir}/out.jsonl"]
ONE = ["generate", "--checkpoint={run}", "--prompt=x"]
SERVE = ["serve", "--checkpoint={run}"]
PREPARE = ["prepare", "--output={dir}/new", "--tokenizer={run}/tokenizer.model"]
HEADLINE = ["bench", "headline", "--output={dir}/new"]
PLAN = ["plan", "--config=configs/quickstart.py", "--topology=v5e:2x2"]
DUMP = ["plan", "--hlo=none", "--topology=v5e:2x2"]

BAD = {
    "unknown key": ([*TRAIN, NEW, "--config.learning_rat=1"], "--config.learning_rat is not a config key; did you"),
    "unknown flag": ([*TRAIN, "--wrokdir=x"], "Unknown command line flag 'wrokdir'. Did you mean: workdir ?\n"),
    "unknown flag like one of absl's": ([*PLAN, "--workdir=x"], "Unknown command line flag 'workdir'\n"),
    "wrong type": ([*TRAIN, NEW, "--config.steps=many"], "config.steps"),
    "argument that is no flag": ([*TRAIN, NEW, "steps=3"], "unexpected argument 'steps=3': every setting is a --flag"),
    "no config file": (["train", "--config=configs/quick.py", NEW], "--config=configs/quick.py: no such file; here"),
    "config file that raises": (
        ["train", "--config={dir}/raises.py", NEW],
        "raises.py: ZeroDivisionError: division by zero",
    ),
    "config file with an unknown key": (
        ["train", "--config={dir}/old.py", NEW],
        "--config: learning_rte is not a config key",
    ),
    "config file that returns nothing": (["train", "--config={dir}/nothing.py", NEW], "get_config() must return a con"),
    "seconds without end": ([*TRAIN, NEW, "--peer_seconds=inf"], "--peer_seconds=inf: must be a number between"),
    "unknown variant": (["train", "--config=configs/small.py:x", NEW], "unknown variant 'x'; known: stdlib"),
    "no workdir": (TRAIN, "--config=configs/NAME.py and --workdir=DIR are needed"),
    "workdir is a file": ([*TRAIN, "--workdir={dir}/good.jsonl"], "good.jsonl: is a file"),
    "workdir named as a pattern": ([*TRAIN, "--workdir={dir}/run[1]"], "run[1]: contains [;"),
    "key that is not UTF-8": ([*TRAIN, NEW, "--config.data.query_field=\udcff"], "must be text in UTF-8"),
    "workdir of another config": (
        [*TRAIN, "--workdir={run}", "--config.learning_rate=1e-4", "--config.seed=1"],
        "holds a run with another config (differs in learning_rate, seed)",
    ),
    "missing data": ([*TRAIN, NEW, DATA + "none.jsonl"], "none.jsonl does not exist (built in: tasks,"),
    "blank text": ([*TRAIN, NEW, DATA + "blank.txt"], "blank.txt: cannot train a tokenizer of 512 pieces on this "),
    "no weights to start from": ([*TRAIN, NEW, "--config.init_from={dir}"], "--config.init_from: "),
    "no model to draft for": (
        [*TRAIN, NEW, "--config.objective=dflash", "--config.dflash.reads={dir}"],
        "--config.dflash.reads: ",
    ),
    "no model to read, by a system whose section has another name": (
        ["train", "--config={dir}/drafts.py", NEW, "--config.objective=mine", "--config.own.reads={dir}"],
        "--config.own.reads: ",
    ),
    "no prompt": (GENERATE, "one of --input=FILE and --prompt=TEXT are needed"),
    "nobody to talk with": (["chat"], "--checkpoint=DIR is needed"),
    "chat beyond the model": (
        ["chat", "--checkpoint={run}", "--decode.cache_length=99999"],
        "--decode.cache_length=99999: the model reads ",
    ),
    "no checkpoint": (["generate", "--checkpoint={dir}", "--prompt=x"], "holds no checkpoint; give the --workdir"),
    "missing prompts": ([*GENERATE, "--input={dir}/none.jsonl"], "none.jsonl cannot be read"),
    "malformed prompt": ([*GENERATE, "--input={dir}/prompts.jsonl"], 'prompts.jsonl:2: must be {"prompt": "text"} or'),
    "prompts that are no prompts": ([*GENERATE, "--input={dir}/blank.jsonl"], "blank.jsonl holds no prompt"),
    "method of another model": ([*GENERATE, "--prompt=x", "--decode.method=ar"], "which decodes with refusion or seq"),
    "impossible decode setting": ([*GENERATE, "--prompt=x", "--decode.slot_size=0"], "--decode.slot_size=0: must be"),
    "template without gaps": ([*GENERATE, "--input={dir}/gapless.jsonl"], "gapless.jsonl:1: a template needs gaps"),
    "batch beyond memory": (
        [*GENERATE, "--input={dir}/many.jsonl", "--decode.batch_size=1000000", "--decode.cache_length=30000000"],
        "GiB are free: ",
    ),
    "empty stop string": ([*GENERATE, "--prompt=x", "--stop="], "--stop=: is empty"),
    "two configs": (["train", "--config=a.py", "--config=b.py"], "--config=a.py --config=b.py: give one config, and"),
    "output is not to be read": ([*ONE, "--output=/proc/self/mem"], "=/proc/self/mem: exists already, and cannot be"),
    "output is a directory": ([*ONE, "--output={dir}"], "is a directory"),
    "run among its data": (
        [*TRAIN, NEW, "--config.data.path={dir}"],
        "--workdir={dir}/new: lies in --config.data.path={dir}, or",
    ),
    "tokenizer of nothing": (["train_tokenizer", "--input={dir}/none.txt", "--output={dir}/t.model"], "does not exist"),
    "goodput of nothing": (["goodput", "--workdir={dir}"], "holds no events.jsonl of a training run"),
    "no adapters": ([*TRAIN, NEW, "--config.lora.alpha=2"], "alpha=2.0: has no effect without --config.lora.rank"),
    "other objective": ([*TRAIN, NEW, "--config.llada.shuffle=1"], "=True: has no effect without --config.objective"),
    "turns of prepared data": (
        [*TRAIN, NEW, DATA + "prepared", "--config.data.turns=all"],
        "turns=all: has no effect without --config.data.path=FILES (`prepare` has a flag of this name)",
    ),
    "no tokenizer": ([*TRAIN, NEW, "--config.data.tokenizer={dir}/t"], "data.tokenizer={dir}/t: is not a file"),
    "data in no store": ([*TRAIN, NEW, "--config.data.path=http://x/y"], "--config.data.path=http://x/y: names no"),
    "output over the model": (
        [*ONE, "--output={run}/model.json"],
        "model.json: exists already, and does not hold answers; name another place",
    ),
    "page over another file": (
        [*ONE, "--watch={dir}/good.jsonl"],
        "--watch={dir}/good.jsonl: exists already, and is not a page of ours",
    ),
    "page of no row": (["inspect_data", "--data={dir}", "--verify", "--html={dir}/new.html"], "--verify shows no row"),
    "page over the answers": ([*GENERATE, "--prompt=x", "--watch={dir}/out.jsonl"], "out.jsonl: is also the --output"),
    "page of too many": (
        ["generate", "--checkpoint={run}", "--input={dir}/seventeen.jsonl", "--watch={dir}/new.html"],
        "a page plays 16 prompts at most; {dir}/seventeen.jsonl holds 17",
    ),
    "page that compares with nothing": (
        [*ONE, "--watch={dir}/new.html", "--compare=nothing"],
        "--compare=nothing: is neither a directory nor a decoder; known: ",
    ),
    "compared without a page": ([*ONE, "--compare=sequential"], "--compare=sequential: needs --watch=PAGE.html"),
    "page of a decoder that cannot": ([*ONE, "--watch={dir}/new.html", "--compare=ar"], "--compare=ar: "),
    "a threshold that exact infilling does not read": (
        [*ONE, "--decode.infill=exact", "--decode.token_threshold=0.5"],
        "--decode.token_threshold=0.5: has no effect with infill=exact",
    ),
    "a mask token for another format": (
        ["convert", "--from={run}", "--to={dir}/new", "--format=huggingface", "--mask_token_id=3"],
        "--mask_token_id=3: has no effect with --format=huggingface",
    ),
    "nothing to prepare": (["prepare", "--output={dir}/new"], "--input, --output and --tokenizer are needed"),
    "input that is not there": ([*PREPARE, "--input={dir}/none*"], "none*: no such file"),
    "URLs that cannot be read": (
        [*PREPARE, "--input={dir}/good.jsonl", "--blocked_urls=/proc/self/mem"],
        "/proc/self/mem cannot be read: Input/output error",
    ),
    "input that is malformed": ([*PREPARE, "--input={dir}/malformed.jsonl"], "malformed.jsonl:3: not JSON"),
    "input that is blank": (
        [*PREPARE, "--input={dir}/blank.jsonl", "--workers=1"],
        "--input: no document can be used; the first problem: {dir}/blank.jsonl holds no example",
    ),
    "filter that is none": (
        [*PREPARE, "--input={dir}/good.jsonl", "--filters=x"],
        "--filters=x: no filter of that name; there are gopher_repetition",
    ),
    "output that is in use": (
        ["prepare", "--input={dir}/good.jsonl", "--output={run}", "--tokenizer={run}/tokenizer.model"],
        "is not empty; name a new directory",
    ),
    "share of nothing": (
        [*PREPARE, "--input={dir}/good.jsonl", "--row_length=64", "--workers=1", "--held_out=1e-320"],
        "no document was held out",
    ),
    "output over its input": (
        ["generate", "--checkpoint={run}", "--input={dir}/many.jsonl", "--output={dir}/many.jsonl"],
        "many.jsonl: lies in --input=",
    ),
    "tokenizer over its corpus": (
        ["train_tokenizer", "--input={dir}/good.jsonl", "--output={dir}/good.jsonl"],
        "good.jsonl: lies in --input=",
    ),
    "tokenizer over another file": (
        ["train_tokenizer", "--input={dir}/good.jsonl", "--output={run}/model.json"],
        "model.json: exists already, and is not a tokenizer of ours",
    ),
    "a corpus and another": (["train_tokenizer", "--input=a", "--input=b"], "--input=b: already defined as a"),
    "numbers that are no digits": (["bench", "decode", "--batch_sizes=8,²"], "must be numbers from 1 to"),
    "setup of another decoder": (
        ["bench", "decode", "--setup=ar slot_size=4"],
        "--setup='ar slot_size=4': slot_size=4: the decoder 'ar' has only ",
    ),
    "another size": (
        ["bench", "decode", "--size=8b", "--checkpoint={run}"],
        "--size=8b: has no effect with --checkpoint",
    ),
    "setup without a decoder": (["bench", "decode", "--setup="], "unknown"),
    "inspecting nothing": (["inspect_data", "--data={dir}"], "holds no rows (there is no manifest.json)"),
    "inspecting by no run": (
        ["inspect_data", "--config=configs/quickstart.py", "--workdir={dir}"],
        "holds no run to take the tokenizer from",
    ),
    "inspecting another run": (
        ["inspect_data", *TRAIN[1:], "--workdir={run}", "--config.seed=1", "--config.data.examples=400"],
        "holds a run with another config (differs in data.examples, seed)",
    ),
    "report on nothing": (["quickstart", "--workdir={dir}"], "holds no checkpoint"),
    "page of no run": (["report", "--workdir={run},{dir}", "--output={dir}/new"], "--workdir={dir}: holds no run"),
    "page of an empty run": (
        ["report", "--workdir={dir}/empty", "--output={dir}/new"],
        "empty: there is no record in its metrics.jsonl yet",
    ),
    "page nowhere": (["report", "--workdir={run}"], "--workdir=DIR,DIR and --output=DIR are needed"),
    "page of too many runs": (
        ["report", "--workdir={run},1,2,3,4,5,6,7,8", "--output={dir}/new"],
        "--workdir: a page shows 8 runs at most, not 9",
    ),
    "page over a page": (
        ["report", "--workdir={run}", "--output={dir}/taken"],
        "taken/index.html: exists already, and is not a page of ours",
    ),
    "page in a file": (["report", "--workdir={run}", "--output={dir}/taken/index.html"], "index.html: is a file"),
    "no benchmark": (["bench"], "bench '': unknown; known: calibration, decode, "),
    "a load on another model": (["bench", "serve", "--checkpoint={run}", "--setup=ar"], "--setup='ar': "),
    "a load of nobody": (["bench", "serve", "--checkpoint={run}", "--clients=0"], "--clients=0"),
    "nothing to serve": (["serve"], "--checkpoint=DIR is needed"),
    "no model to serve": (["serve", "--checkpoint=/nowhere"], "/nowhere"),
    "no key": ([*SERVE, "--api_key="], "--api_key: holds no key"),
    "no port": ([*SERVE, "--port=70000"], "--port"),
    "no host": ([*SERVE, "--host=no.such.host.invalid"], "--host=no.such.host.invalid: not an address"),
    "answers without room": ([*SERVE, "--decode.max_new_tokens=64"], "--decode.max_new_tokens=64: leaves no room"),
    "texts beyond the model": ([*SERVE, "--decode.cache_length=99"], "--decode.cache_length=99: the model reads 64"),
    "decoder of another model": ([*SERVE, "--decode.method=apd"], "--decode.method=apd"),
    "setting of another decoder": ([*SERVE, "--decode.steps=3"], "--decode.steps=3: the decoder 'refusion' has only"),
    "no place for a comparison": (["bench", "headline"], "--output=: name a directory"),
    "comparison over a run": (["bench", "headline", "--output={run}"], "{run} is not empty, and holds no comparison"),
    "comparison of nothing": ([*HEADLINE, "--systems=gan"], "--systems=gan: unknown; known: ar, "),
    "comparison with no seed": ([*HEADLINE, "--systems=ar:0"], "=ar:0: after the colon, give a number of seeds from 1"),
    "comparison at no rate": ([*HEADLINE, "--systems=ar:1:fast"], ":fast: after the seeds, give one learning rate abo"),
    "comparison of a drafter": ([*HEADLINE, "--systems=dflash"], "--systems=dflash: unknown; known: ar, "),
    "comparison without answers": (
        [*HEADLINE, "--config=configs/quickstart.py"],
        "data.path=tasks has no answers to check; families has",
    ),
    "comparison at no cost": ([*HEADLINE, "--speed_proxy=600x2"], "=600x2: must be a multiple of 128, x and"),
    "drill over a run": (["drill", *TINY_RUN, "--workdir={run}"], "{run} holds checkpoints, which no drill wrote"),
    "drill of no kind": (["drill", *TINY_RUN, NEW, "--kinds=flood"], "--kinds=flood: unknown; known: kill, term,"),
    "conversion over a run": (
        ["convert", "--format=orbax", "--from={run}", "--to={run}"],
        "exists; name a new directory",
    ),
    "measuring no GPU": (["bench", "gpu", "--output={dir}/new"], "--rehearse tries it"),
    "rows for a decoder": (
        [*PLAN, "--what=decode", "--rows_per_chip=64"],
        "--rows_per_chip: cannot be used with --what=decode",
    ),
    "a kind of foreign program": ([*DUMP, "--what=decode"], "--what: cannot be used with --hlo"),
    "length of bench decode": (
        ["bench", "decode", "--max_new_tokens=7"],
        "flag 'max_new_tokens'. Did you mean: decode.max_new_tokens ?\n",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_changes_nothing(case, files, trained_run):
    (command, *flags), said = BAD[case]
    before = contents(files, trained_run)
    err = refused(command, *(flag.format(run=trained_run, dir=files) for flag in flags))
    assert said.replace("{dir}", str(files)).replace("{run}", str(trained_run)) in err
    assert contents(files, trained_run) == before


def test_help_of_the_benchmarks_names_them():
    out, _ = run("bench", "--help")
    assert " calibration, decode, " in out
    assert run("bench", "-h") == (out, "")
    assert run("bench", "decode", "-h") == run("bench", "decode", "--help")


@pytest.mark.parametrize(
    ("command", "flag", "default"),
    [
        (["quickstart"], "decode.batch_size", "1"),
        (["evaluate"], "decode.max_new_tokens", "the task's, or 256"),
        (["generate"], "decode.batch_size", "64"),
        (["bench", "decode"], "decode.max_new_tokens", "128"),
        (["evaluate"], "decode.block_length", "0"),
        (["bench", "serve"], "clients", "1,8,32"),
    ],
)
def test_help_tells_the_default_that_the_command_uses(command, flag, default):
    lines = run(*command, "--help")[0].splitlines()
    line = lines[lines.index(f"  --{flag}") + 1]
    assert line.endswith(f" (default: {default})")
    if flag == "decode.block_length":  # what a 0 means, and each decoder that has it, with its own default
        assert "llada: Tokens of a block; blocks are decoded one after the other; 0: the whole answer" in line
        assert "fast_dllm: " in line
        assert " (default: 32); " in line


@pytest.mark.parametrize(
    "command",
    "train generate chat evaluate serve plan convert drill train_tokenizer quickstart goodput prepare".split()
    + ["inspect_data", "report"],
)
def test_help_explains_every_flag(command):
    out, _ = run(command, "--help")
    assert out.index(f"python -m refusion_jax.{command}") < out.index("Flags:")
    lines = out[out.index("Flags:") :].splitlines()
    flags = [i for i, line in enumerate(lines) if line.startswith("  --")]
    assert flags
    assert all(lines[i + 1].startswith("      ") and len(lines[i + 1].split()) > 1 for i in flags)
    assert "default: []" not in out
    assert "repeat this option" not in out  # absl's words, on a line of their own
    if command == "train":
        assert "  --config.model.hidden_size" in lines
    if command == "generate":  # settings of the default decoder, and of no other
        assert "  --decode.slot_size" in lines
        assert "  --decode.block_length" not in lines
