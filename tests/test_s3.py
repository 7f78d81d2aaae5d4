"""Reading from S3: `pip install -e '.[s3]' 'moto[server]'`, which is a server of S3's own interface on this machine."""

import json

import pytest
from conftest import refused, run
from helpers import write_tokenizer

pytest.importorskip("s3fs", reason="no extra [s3] is installed")
server = pytest.importorskip("moto.server", reason="moto[server] is not installed")


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of S3, named `bucket`, which this test's processes find by their environment."""
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    own = server.ThreadedMotoServer(port=0)
    own.start()
    host, port = own.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    yield boto3.resource("s3").create_bucket(Bucket="bucket")
    own.stop()


def test_what_is_prepared_from_s3_is_what_local_files_give(bucket, tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "in").mkdir()
    for number in range(3):
        lines = [json.dumps({"text": f"document {number} {line} " * 20}) + "\n" for line in range(200)]
        content = "".join(lines).encode()
        (tmp_path / "in" / f"{number}.jsonl").write_bytes(content)
        bucket.put_object(Key=f"in/{number}.jsonl", Body=content)
    flags = [f"--tokenizer={tokenizer}", "--row_length=64"]
    run("prepare", *flags, f"--input={tmp_path}/in/*.jsonl", f"--output={tmp_path}/local")
    run("prepare", *flags, "--input=s3://bucket/in/*.jsonl", f"--output={tmp_path}/remote")
    local, remote = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("local", "remote")
    )
    manifests = [json.loads(directory.pop("manifest.json")) for directory in (local, remote)]
    assert local == remote
    for manifest in manifests:
        for name in ("command", "plan", "sources", "times"):  # which tell where it was read
            del manifest[name]
    assert manifests[0] == manifests[1]


def test_what_is_not_in_s3_is_named(bucket, tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    flags = [f"--tokenizer={tokenizer}", f"--output={tmp_path}/out"]
    err = refused("prepare", *flags, "--input=s3://bucket/none/*.jsonl")
    assert err.startswith("error: --input=s3://bucket/none/*.jsonl: ")
    assert not (tmp_path / "out").exists()
