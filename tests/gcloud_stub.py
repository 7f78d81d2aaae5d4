"""Stands for `gcloud` on PATH: notes every call, and answers from a script or with real processes on this machine.

In $GCLOUD_STUB: calls.jsonl (written); answers.json (optional): for describe, ssh wait ... the exit codes and outputs
to give, one a call, null as an output where no worker is reached; without it a TPU of one worker is the folder vm/, and
remote commands run there.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(os.environ["GCLOUD_STUB"])
arguments = sys.argv[1:]
with (HOME / "calls.jsonl").open("a") as calls:
    print(json.dumps(arguments), file=calls)
assert arguments[:3] == ["compute", "tpus", "queued-resources"], arguments
verb = arguments[3]
command = next((a.removeprefix("--command=") for a in arguments if a.startswith("--command=")), "")
if "worker.sh" in command:
    verb += " " + command.split("worker.sh ")[1].split()[0]

script = HOME / "answers.json"
if script.exists():
    answers = json.loads(script.read_text())
    code, text = answers[verb].pop(0) if answers.get(verb) else (0, "")
    script.write_text(json.dumps(answers))
    if text is not None:
        print("reached" if command else text)
        print(text, file=sys.stderr)
    sys.exit(code)

vm, state = HOME / "vm", HOME / "state"
if verb == "describe":
    if not state.exists():
        print("ERROR: NOT_FOUND: Requested entity was not found", file=sys.stderr)
        sys.exit(1)
    print(state.read_text())
elif verb == "create":
    vm.mkdir()
    state.write_text("ACTIVE")
elif verb == "delete":
    shutil.rmtree(vm)
    state.unlink()
elif state.read_text() != "ACTIVE":
    sys.exit(255)
elif verb == "scp":
    shutil.copy(arguments[4], vm / arguments[5].split(":")[1])
    binaries = vm / "refusion_jax" / ".venv" / "bin"  # what `worker.sh install` would make
    binaries.mkdir(parents=True)
    (binaries / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (binaries / "python").chmod(0o755)
    (binaries.parent / "installed[tpu]").touch()
else:
    sys.exit(subprocess.run(["bash", "-c", command], cwd=vm).returncode)
