"""The manifests in launch/gke: against the schemas, our own flags, and what launch/README.md says of exit codes."""

import math
import re
import shlex
import tomllib

import jsonschema
import kubernetes_validate
import pytest
import yaml
from conftest import ROOT, run

from refusion_jax.distributed.preemption import EXIT_CODE
from refusion_jax.serving import access

GKE = ROOT / "launch" / "gke"
KUBERNETES = "1.34"
JOBSET = yaml.safe_load((GKE / "train.yaml").read_text())
DEPLOYMENT, SERVICE = yaml.safe_load_all((GKE / "serve.yaml").read_text())

[SLICE] = JOBSET["spec"]["replicatedJobs"]
JOB = SLICE["template"]["spec"]
TRAINER, SERVER = JOB["template"]["spec"], DEPLOYMENT["spec"]["template"]["spec"]
PODS = pytest.mark.parametrize("pod", [TRAINER, SERVER])


def fields(*required: str, **properties: dict) -> dict:
    """The schema of an object that has no other fields."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def several(items: dict) -> dict:
    return {"type": "array", "items": items, "minItems": 1}


TEXT, FLAG = {"type": "string"}, {"type": "boolean"}
# As far as we use them: of config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml in kubernetes-sigs/jobset v0.9.1,
# and names and reasons of its pkg/webhooks/jobset_webhook.go.
REASONS = ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"]
RULE = fields(
    "action",
    "name",
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    onJobFailureReasons=several({"enum": REASONS}),
)
SPEC = fields(
    network=fields(enableDNSHostnames=FLAG, publishNotReadyAddresses=FLAG, subdomain=TEXT),
    failurePolicy=fields(maxRestarts={"type": "integer"}, rules=several(RULE)),
    replicatedJobs=several(
        fields("name", "template", name=TEXT, replicas={"type": "integer", "minimum": 0}, template={"type": "object"})
    ),
)


def flags(pod: dict) -> dict[str, str]:
    [container] = pod["containers"]
    return {name: value for name, _, value in (flag.partition("=") for flag in container["args"])}


def chips(pod: dict) -> tuple[int, int]:
    """Of a slice, and of one of its hosts."""
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    return math.prod(map(int, topology.split("x"))), pod["containers"][0]["resources"]["limits"]["google.com/tpu"]


def test_manifests_are_as_the_schemas_have_them():
    meta = fields("name", name=TEXT, labels={"type": "object"}, annotations={"type": "object"})
    kind = {"apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"}, "kind": {"const": "JobSet"}}
    jsonschema.validate(JOBSET, fields(*kind, "metadata", "spec", metadata=meta, spec=SPEC, **kind))
    for job in JOBSET["spec"]["replicatedJobs"]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]}
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    for manifest in (DEPLOYMENT, SERVICE):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_what_is_at_fault_fails_at_once_and_all_else_starts_again_uncounted():
    table = (ROOT / "launch" / "README.md").read_text().partition("| exit code |")[2].partition("\n\n")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)}
    [rule] = JOB["podFailurePolicy"]["rules"]
    assert set(rule["onExitCodes"]["values"]) == codes - {0, EXIT_CODE}
    assert (rule["action"], rule["onExitCodes"]["containerName"]) == ("FailJob", TRAINER["containers"][0]["name"])
    assert (JOB["backoffLimit"], TRAINER["restartPolicy"]) == (0, "Never")
    first, second = JOBSET["spec"]["failurePolicy"]["rules"]
    assert (first["action"], first["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert second["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert second["onJobFailureReasons"] == ["BackoffLimitExceeded"]


def test_every_host_of_the_slices_trains():
    whole, host = chips(TRAINER)
    assert JOB["completions"] == JOB["parallelism"] == whole / host
    assert JOB["completionMode"] == "Indexed"
    assert int(flags(TRAINER)["--config.mesh.replica"]) == SLICE["replicas"]
    assert JOBSET["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}


def test_there_is_time_for_a_checkpoint():
    state, rate = 98e9, 0.1e9  # bytes of 8B with its optimizer; bytes a second of a host, written and read again
    assert TRAINER["terminationGracePeriodSeconds"] > 2 * 2 * state / rate / (SLICE["replicas"] * JOB["completions"])


def test_the_server_is_reached_watched_and_drained():
    [container] = SERVER["containers"]
    [port], [to] = container["ports"], SERVICE["spec"]["ports"]
    assert (port["containerPort"], port["name"]) == (int(flags(SERVER)["--port"]), to["targetPort"])
    assert flags(SERVER)["--host"] == "0.0.0.0"
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert set(paths.values()) <= set(access._OPEN)
    assert all(container[f"{name}Probe"]["httpGet"]["port"] == port["name"] for name in paths)
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels
    paused = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = re.search(r"^_GRACE = (\d+)", (ROOT / "refusion_jax/serving/connections.py").read_text(), re.M)[1]
    assert SERVER["terminationGracePeriodSeconds"] > paused + int(grace)
    assert [e["name"] for e in container["env"] if "secretKeyRef" in e["valueFrom"]] == ["REFUSION_API_KEY"]
    assert chips(SERVER) == (int(flags(SERVER)["--mesh.tensor"]),) * 2  # it runs on one host


@PODS
def test_a_process_that_still_imports_its_packages_is_not_process_1_and_ends_on_sigterm(pod):
    assert pod["shareProcessNamespace"]


@PODS
def test_our_own_flags_are_meant(pod, tmp_path):
    [container] = pod["containers"]
    *python, module = container["command"]
    assert python == ["python", "-m"]
    missing = {"train": "--config.data.path", "serve": "--checkpoint"}[module.removeprefix("refusion_jax.")]
    given = [*container["args"], f"{missing}={tmp_path}/none"]
    if module.endswith("train"):
        given += [f"--workdir={tmp_path}/run", "--config.init_from="]
    _, err = run(module.removeprefix("refusion_jax."), *given, code=2)
    assert f"{tmp_path}/none" in err


def test_the_image_holds_what_runs():
    lines = [shlex.split(line) for line in (GKE / "Dockerfile").read_text().splitlines()[1:]]
    assert all((ROOT / path).exists() for word, *paths in lines if word == "COPY" for path in paths[:-1])
    [[extras]] = [re.findall(r"\.\[(.*)\]", " ".join(line)) for line in lines if "--editable" in line]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) == {"tpu", "serve"} <= set(project["optional-dependencies"])
    locked_for = re.search(r"--python-version (\S+)", (ROOT / "launch" / "requirements.lock").read_text())[1]
    assert lines[0] == ["FROM", f"python:{locked_for}-slim"]
    assert lines[-1] == ["USER", "1000"]
    images = {pod["containers"][0]["image"] for pod in (TRAINER, SERVER)}
    assert images == {"IMAGE"}
