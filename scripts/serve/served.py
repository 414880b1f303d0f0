"""A server of the release build in a process of its own, and what it holds."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
MODEL = CACHE / "engine-host/models/SmolLM2-135M-Instruct.Q4_1.gguf"


def config(folder, model=MODEL, plugins=ROOT / "plugins", **lines):
    """The built-in configuration with other values for some of its keys."""
    text = (ROOT / "crates/engine-host/src/config/default.toml").read_text()
    lines |= {"plugin_dirs": [str(pathlib.Path(plugins).resolve())], "path": str(pathlib.Path(model).resolve())}
    for key, value in lines.items():
        text, count = re.subn(rf"^(# )?{key} = .*$", lambda _: f"{key} = {json.dumps(value)}", text, count=1, flags=re.M)
        assert count == 1, key
    path = pathlib.Path(folder) / "engine.toml"
    path.write_text(text)
    return path


class Served:
    """`engine-host serve`; `lines` are keys of the configuration."""

    def __init__(self, program=None, arguments=(), **lines):
        self.folder = tempfile.TemporaryDirectory()
        self.has_cache_in_memory = lines.get("device", "cpu") == "cpu"
        program = program or ROOT / "target/release/engine-host"
        path = config(self.folder.name, **lines)
        self.command = [str(program), "serve", "--config", str(path), "--port", "0", *arguments]
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True)
        self.base = None
        for line in self.process.stderr:
            if found := re.match(r"listening on (http://\S+)", line):
                self.base = found[1]
            if line.startswith("ready"):
                break
        else:
            sys.exit(f"the server ended: {self.process.wait()}")
        self.host, self.port = self.base.removeprefix("http://").split(":")
        threading.Thread(target=lambda: [None for _ in self.process.stderr], daemon=True).start()

    def get(self, path):
        with urllib.request.urlopen(self.base + path, timeout=60) as answer:
            return json.load(answer)

    def held(self):
        """Requests, tokens of cache, descriptors, threads, and resident MB but for pages that are cached for later."""
        load = self.get("/v1/loads")["loads"][0]
        kv = next(r for r in self.get("/admin/plugins")["resources"] if r["kind"] == "kv")
        cached = kv["bytes"] / kv["state"]["pages"]["total"] * kv["state"]["pages"]["cached"] * self.has_cache_in_memory
        proc = pathlib.Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        return {
            "requests": load["num_total_reqs"],
            "tokens": load["num_used_tokens"],
            "descriptors": len(os.listdir(proc / "fd")),
            "threads": int(status["Threads"]),
            "memory_mb": int(status["VmRSS"].split()[0]) // 1024 - int(cached) // 2**20,
        }

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        return self.process.wait()
