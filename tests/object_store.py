"""A small Google Cloud Storage on this machine: its JSON API as far as gcsfs and tensorstore ask for it.

Objects are whole, have a generation, and cannot be appended to.
"""

import base64
import collections
import email
import http.server
import itertools
import json
import re
import threading
import time
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c


class ObjectStore(http.server.ThreadingHTTPServer):
    """One bucket, named `bucket`; `objects` maps names to (generation, content), `read` to bytes read.

    Content comes after `latency` seconds.
    """

    daemon_threads = True
    request_queue_size = 64  # connections that nobody has accepted yet

    def __init__(self):
        super().__init__(("localhost", 0), _Handler)
        self.latency = 0.0
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.uploads: dict[str, str] = {}
        self.read = collections.Counter()
        self.lock, self.generations = threading.Lock(), itertools.count(1000)
        self.url = f"http://localhost:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_):
        """A client that hangs up is none."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle_all(self):
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        self.body = self._read_body()
        path = re.sub(r"^/(upload|download)", "", url.path)
        with self.server.lock:
            if path.rstrip("/") == "/storage/v1/b/bucket":
                self.reply({"kind": "storage#bucket", "name": "bucket", "id": "bucket"})
            elif "upload_id" in self.query or (self.command == "POST" and "uploadType" in self.query):
                self.upload()
            elif path.rstrip("/") == "/storage/v1/b/bucket/o":
                self.list()
            elif match := re.fullmatch(r"/storage/v1/b/bucket/o/(.+)/(?:copyTo|rewriteTo)/b/bucket/o/(.+)", path):
                self.copy(*map(unquote, match.groups()))
            elif match := re.fullmatch(r"/storage/v1/b/bucket/o/(.+)", path) or re.fullmatch(r"/bucket/(.+)", path):
                self.one(unquote(match[1]))
            else:
                self.reply({"error": {"code": 404, "message": path}}, 404)
        self.send()

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_all  # noqa: N815

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().strip(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def reply(self, content: dict | bytes, code: int = 200, **headers: str) -> None:
        self.answer = content, code, headers

    def send(self) -> None:
        """Sends the answer, while other requests are handled."""
        content, code, headers = self.answer
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        time.sleep(self.server.latency if body is content else 0.0)
        if self.command != "HEAD":
            self.wfile.write(body)

    def about(self, name: str) -> dict:
        generation, content = self.server.objects[name]
        times = {"timeCreated": "2026-01-01T00:00:00.000Z", "updated": "2026-01-01T00:00:00.000Z"}
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": "bucket",
            "size": str(len(content)),
            "generation": str(generation),
            "metageneration": "1",
            "crc32c": base64.b64encode(google_crc32c.Checksum(content).digest()).decode(),
            "contentType": "application/octet-stream",
            **times,
        }

    def is_refused(self, name: str) -> bool:
        """Replies, where the condition of a request does not hold."""
        generation = self.server.objects.get(name, (0,))[0]
        wanted, unwanted = self.query.get("ifGenerationMatch"), self.query.get("ifGenerationNotMatch")
        if wanted is not None and int(wanted) != generation:
            self.reply({"error": {"code": 412, "message": "conditionNotMet"}}, 412)
        elif unwanted is not None and int(unwanted) == generation:
            self.reply(b"", 304)
        else:
            return False
        return True

    def store(self, name: str, content: bytes) -> None:
        if not self.is_refused(name):
            self.server.objects[name] = next(self.server.generations), content
            self.reply(self.about(name))

    def upload(self) -> None:
        kind = self.query.get("uploadType", "resumable")
        if kind == "media":
            self.store(self.query["name"], self.body)
        elif kind == "multipart":
            header = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            about, _ = email.message_from_bytes(header + self.body).get_payload()
            separator = b"\r\n\r\n" if b"\r\n\r\n" in self.body else b"\n\n"
            boundary = b"--" + re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
            part = self.body.split(boundary)[2]
            raw = part[part.index(separator) + len(separator) :]
            raw = raw[:-2] if raw.endswith(b"\r\n") else raw.removesuffix(b"\n")
            self.store(json.loads(about.get_payload())["name"], raw)
        elif "upload_id" in self.query:
            name = self.server.uploads[self.query["upload_id"]]
            content_range = self.headers.get("Content-Range", "")
            first = re.match(r"bytes (\d+)-", content_range)
            so_far = self.server.uploads.get(name + "\0", b"") if first and int(first[1]) else b""
            if content_range.endswith("/*"):
                self.server.uploads[name + "\0"] = so_far + self.body
                self.reply(b"", 308, Range=f"bytes=0-{len(so_far + self.body) - 1}")
            else:
                self.store(name, so_far + self.body)
        else:
            name = self.query.get("name") or json.loads(self.body)["name"]
            key = str(next(self.server.generations))
            self.server.uploads[key] = name
            self.reply({}, Location=f"{self.server.url}/upload/storage/v1/b/bucket/o?upload_id={key}")

    def list(self) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        names = sorted(name for name in self.server.objects if name.startswith(prefix))
        names = [name for name in names if self.query.get("startOffset", "") <= name]
        names = [name for name in names if not self.query.get("endOffset") or name < self.query["endOffset"]]
        folders = set()
        if delimiter:
            deeper = [name for name in names if delimiter in name[len(prefix) :]]
            folders = {prefix + name[len(prefix) :].split(delimiter)[0] + delimiter for name in deeper}
            names = [name for name in names if name not in deeper]
        most = int(self.query.get("maxResults") or 1000)
        items = [self.about(name) for name in names[:most]]
        self.reply({"kind": "storage#objects", "items": items, "prefixes": sorted(folders)})

    def copy(self, source: str, target: str) -> None:
        if source not in self.server.objects:
            self.reply({"error": {"code": 404, "message": source}}, 404)
            return
        self.server.objects[target] = next(self.server.generations), self.server.objects[source][1]
        about = self.about(target)
        self.reply({**about, "done": True, "resource": about, "kind": "storage#rewriteResponse"})

    def one(self, name: str) -> None:
        if name not in self.server.objects:
            self.reply({"error": {"code": 404, "message": f"No such object: {name}"}}, 404)
        elif self.is_refused(name):
            pass
        elif self.command == "DELETE":
            del self.server.objects[name]
            self.reply(b"", 204)
        elif self.query.get("alt") == "media" or self.path.startswith(("/download", "/bucket/")):
            self.download(name)
        else:
            self.reply(self.about(name))

    def download(self, name: str) -> None:
        generation, content = self.server.objects[name]
        headers = {"x-goog-generation": str(generation)}
        wanted = re.fullmatch(r"bytes=(-?\d+)-?(\d*)", self.headers.get("Range", ""))
        if not wanted:
            self.server.read[name] += len(content)
            self.reply(content, **headers)
            return
        first = int(wanted[1]) if int(wanted[1]) >= 0 else max(0, len(content) + int(wanted[1]))
        last = min(int(wanted[2]) if wanted[2] else len(content) - 1, len(content) - 1)
        if first >= len(content):
            self.reply(b"", 416)
            return
        self.server.read[name] += last + 1 - first
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.reply(content[first : last + 1], 206, **headers)
