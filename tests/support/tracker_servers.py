"""Servers of W&B and MLflow on 127.0.0.1, as far as a training asks them: they store what they get.

W&B follows wandb-core 0.31: GraphQL at `/graphql`, and `/files/ENTITY/PROJECT/RUN/file_stream`, whose lines have an
offset in the file that they belong to. A resumed run gets back its number of lines, its last line and its summary.
MLflow follows the REST API of 3.17. Neither stores artifacts, and so no tables.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

API_KEY = "k" * 40
HISTORY, EVENTS, SUMMARY, OUTPUT = "wandb-history.jsonl", "wandb-events.jsonl", "wandb-summary.json", "output.log"


class TrackerServer(ThreadingHTTPServer):
    """Answers by JSON. `is_down` answers every request by 503, as a proxy before a server that is away."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.unknown: list[str] = []
        """What was asked for and is not supported."""
        self.is_down = False
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the connections of a killed process."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, request: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
        """The status and the content of an answer. `request` is the body or the query; `key` is the password."""
        raise NotImplementedError


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: TrackerServer

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        is_json = self.headers.get("Content-Type", "").startswith("application/json")
        request = json.loads(body) if is_json and body else dict(parse_qsl(url.query))
        key = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic ")).decode()
        with self.server.lock:
            if self.server.is_down:
                code, answer = 503, {"error": "down"}
            else:
                code, answer = self.server.answer(url.path, request, key.partition(":")[2])
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PATCH = do_PUT = do_POST


@dataclass
class StoredRun:
    """What the server has of a run."""

    name: str
    display_name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)
    """Name of a streamed file -> its lines."""
    uploads: list[str] = field(default_factory=list)
    """Names of the files that were uploaded."""
    is_preempting: bool = False
    exit_code: int | None = None
    """Of the last process that has finished the run."""

    @property
    def state(self) -> str:
        """How the end of the last process is shown."""
        shown = {None: "running", 0: "finished", 255: "killed"}
        return shown.get(self.exit_code, "preempted" if self.is_preempting else "failed")

    @property
    def records(self) -> list[dict[str, Any]]:
        """The history, without the values that W&B adds."""
        lines = [json.loads(line) for line in self.files.get(HISTORY, [])]
        return [{name: value for name, value in line.items() if not name.startswith("_")} for line in lines]


class WandbServer(TrackerServer):
    """A server of W&B; `runs` are by their id."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, StoredRun] = {}

    def answer(self, path: str, request: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
        if path.startswith("/upload/"):
            run, _, name = path.removeprefix("/upload/").partition("/")
            self.runs[run].uploads.append(name)
            return 200, {}
        if key != API_KEY:
            return 401, {"errors": [{"message": "not logged in"}]}
        if match := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path):
            self._stream(self.runs[match[1]], request)
            return 200, {}
        operation = re.search(r"(?:query|mutation)\s+(\w+)", request.get("query", ""))
        return 200, {"data": self._operate(operation[1] if operation else path, request.get("variables") or {})}

    def _operate(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL operation."""
        run = self.runs.get(str(variables.get("name") or variables.get("run") or variables.get("runId")))
        match operation:
            case "Viewer":
                return {"viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
            case "ServerInfo":
                return {"serverInfo": {"cliVersionInfo": {"max_cli_version": "9.0.0"}, "latestLocalVersionInfo": None}}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case "RunResumeStatus":
                project = {"id": "1", "name": variables["project"], "entity": {"id": "1", "name": "me"}}
                return {"model": {**project, "bucket": None if run is None else _resume_status(run)}}
            case "UpsertBucket":
                return {"upsertBucket": self._upsert(variables)}
            case "RunStoppedStatus":
                return {"project": {"run": {"stopped": False}}}
            case "OrganizationCoreWeaveOrganizationID":
                return {}
            case "CreateRunFiles":
                assert run is not None
                files = [
                    {"name": name, "uploadUrl": f"{self.url}/upload/{run.name}/{name}"} for name in variables["files"]
                ]
                return {"createRunFiles": {"runID": run.name, "uploadHeaders": [], "files": files}}
        self.unknown.append(operation)
        return {}

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["name"]
        inserted = name not in self.runs
        run = self.runs.setdefault(name, StoredRun(name))
        # A process sends this also later than at its start.
        if run.exit_code is not None:
            run.is_preempting, run.exit_code = False, None
        run.display_name = variables.get("displayName") or run.display_name
        run.config.update(json.loads(variables.get("config") or "{}"))
        project = {"id": "1", "name": variables["project"], "entity": {"id": "1", "name": "me"}}
        bucket = {
            "id": f"id-{name}",
            "name": name,
            "displayName": run.display_name,
            "config": json.dumps(run.config),
            "project": project,
            "historyLineCount": len(run.files.get(HISTORY, [])),
        }
        return {"bucket": bucket, "inserted": inserted}

    def _stream(self, run: StoredRun, request: dict[str, Any]) -> None:
        """Store lines of the file stream at their offsets, and how the run ended."""
        run.is_preempting |= bool(request.get("preempting"))
        run.exit_code = request["exitcode"] if request.get("complete") else run.exit_code
        for file, chunk in (request.get("files") or {}).items():
            lines = run.files.setdefault(file, [])
            lines[chunk["offset"] : chunk["offset"] + len(chunk["content"])] = chunk["content"]


def _resume_status(run: StoredRun) -> dict[str, Any]:
    summary = run.files.get(SUMMARY, [])
    return {
        "id": f"id-{run.name}",
        "name": run.name,
        "displayName": run.display_name,
        "summaryMetrics": summary[-1] if summary else "{}",
        "logLineCount": len(run.files.get(OUTPUT, [])),
        "historyLineCount": len(run.files.get(HISTORY, [])),
        "eventsLineCount": len(run.files.get(EVENTS, [])),
        "historyTail": json.dumps(run.files.get(HISTORY, [])[-1:]),
        "eventsTail": json.dumps(run.files.get(EVENTS, [])[-1:]),
        "config": json.dumps(run.config),
        "tags": [],
        "notes": "",
        "wandbConfig": json.dumps({"t": run.config.get("_wandb", {}).get("value", {}).get("t", {})}),
    }


class MlflowServer(TrackerServer):
    """A tracking server of MLflow; `metrics` are the stored values of each run, by its id."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, list[dict[str, Any]]] = {}
        self.states: dict[str, str] = {}
        self.asked: list[str] = []
        """The requests, by their path."""

    def answer(self, path: str, request: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
        run_id = request.get("run_id", "")
        self.asked.append(path.removeprefix("/api/2.0/mlflow/"))
        match path.removeprefix("/api/2.0/mlflow/"):
            case "experiments/get-by-name":
                return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such experiment"}
            case "experiments/create":
                return 200, {"experiment_id": "1"}
            case "runs/create":
                run_id = f"{len(self.metrics):032x}"
                self.metrics[run_id], self.states[run_id] = [], "RUNNING"
                return 200, {"run": {"info": self._info(run_id), "data": {}}}
            case "runs/get":
                newest: dict[str, dict[str, Any]] = {}
                for item in self.metrics[run_id]:
                    newest[item["key"]] = max(item, newest.get(item["key"], item), key=lambda item: int(item["step"]))
                return 200, {"run": {"info": self._info(run_id), "data": {"metrics": list(newest.values())}}}
            case "runs/update":
                self.states[run_id] = request.get("status", self.states[run_id])
                return 200, {"run_info": self._info(run_id)}
            case "runs/log-batch":
                self.metrics[run_id] += request.get("metrics", [])
                return 200, {}
        self.unknown.append(path)
        return 404, {"error_code": "ENDPOINT_NOT_FOUND", "message": path}

    def _info(self, run_id: str) -> dict[str, Any]:
        return {"run_id": run_id, "run_uuid": run_id, "experiment_id": "1", "status": self.states[run_id]}
