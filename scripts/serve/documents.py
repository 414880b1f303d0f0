#!/usr/bin/env python3
"""Reads what the server tells of itself with programs of others: its metrics with Prometheus' own parser, and
its OpenAPI document with schemathesis, which makes up requests by it and looks at the answers: once as it is, when
most are refused, and once narrowed to what is mostly answered.

    pip install schemathesis prometheus-client
    python scripts/serve/documents.py [--program PROGRAM] [--examples N]

Exits with 1 when the metrics cannot be read, an answer is a 5xx or not as the document says, or one hangs.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from served import Served

CHECKS = "status_code_conformance,content_type_conformance,response_schema_conformance"
# Names that routers read, and their types.
NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "engine_host_resource_calls": "counter",
    "engine_host_plugin_gauge": "gauge",
}


def metrics(server):
    with urllib.request.urlopen(server.base + "/metrics", timeout=60) as answer:
        text = answer.read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    wrong = [name for name, kind in NAMES.items() if getattr(families.get(name), "type", None) != kind]
    if wrong:
        sys.exit(f"metrics that are missing or of another type: {', '.join(wrong)}\n{text}")
    samples = sum(len(family.samples) for family in families.values())
    print(f"metrics: {len(families)} families, {samples} samples, all read by prometheus_client")


def narrowed(document, model):
    """The document for requests that are mostly answered: about this model, with no fields but those in it."""
    document = json.loads(json.dumps(document))
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request"):
            # Fields that are refused with any value but null have that as their example.
            fields = {key: field for key, field in schema["properties"].items() if field.get("example", 0) is not None}
            if "model" in fields:
                fields["model"] = {"enum": [model, None]}
            schema |= {"properties": fields, "additionalProperties": False}
    return document


def faultless(document):
    """Without 500, so that it is a finding. 504 is none: it answers a request whose own deadline has passed."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("500", None)
    return document


def openapi(server, examples):
    tool = pathlib.Path(sys.executable).parent / "schemathesis"
    # A server that has been drained answers nothing more.
    options = ["--exclude-path", "/admin/drain", "--checks", CHECKS, "--request-timeout", "60", "--seed", "1"]
    options += ["--max-examples", str(examples), "--continue-on-failure"]
    document, model = faultless(server.get("/openapi.json")), server.get("/v1/models")["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        codes = []
        for name in ("whole.json", "narrowed.json"):
            (pathlib.Path(folder) / name).write_text(json.dumps(document))
            # It leaves what it found in the working directory.
            command = [tool, "run", name, "--url", server.base, *options]
            codes.append(subprocess.run(command, cwd=folder).returncode)
            document = narrowed(document, model)
    return max(codes)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--program", type=pathlib.Path)
parser.add_argument("--plugins", type=pathlib.Path)
parser.add_argument("--examples", type=int, default=50)
given = parser.parse_args()
lines = {"plugins": given.plugins} if given.plugins else {}
# Short answers, so that thousands of them take minutes.
server = Served(given.program, ["--max-model-len", "96"], **lines)
metrics(server)
code = openapi(server, given.examples)
metrics(server)
server.stop()
sys.exit(1 if code else 0)
