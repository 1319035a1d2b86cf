"""A server that speaks S3, on this machine, whose requests can fail in every way that real ones do.

It is moto's, behind a lock, so that a conditional PUT is one step as it is on S3.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from batchgen.storage.leases import s3_objects

BUCKET = "jobs"
_ERROR = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>no</Message></Error>"
App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class FaultyS3:
    """Answers requests, or fails: before it has done what was asked, or after.

    Attributes:
        url: the endpoint.
        rate: the share of requests that fail.
        hang: for how many seconds an answer is held back that is to come too late.
        heeds_conditions: whether a PUT heeds If-None-Match, as on S3.
        faults: how many failed, by kind.
        requests: how many came.
        last: what WSGI says of the last one.
    """

    kinds: tuple[str, ...] = ("error before", "error after", "late after")

    def __init__(self, seed: int, hang: float) -> None:
        self.rate = 0.0
        self.hang = hang
        self.heeds_conditions = True
        self.faults: dict[str, int] = {}
        self.requests = 0
        self.last: dict[str, Any] = {}
        self._random = random.Random(seed)
        self._app: App = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            self.requests += 1
            self.last = environ
            fails = self._random.random() < self.rate
            kind = self._random.choice(self.kinds) if fails else None
            if kind is not None:
                self.faults[kind] = self.faults.get(kind, 0) + 1
            if not self.heeds_conditions:
                environ.pop("HTTP_IF_NONE_MATCH", None)
            if kind != "error before":
                answer = list(self._app(environ, start if kind is None else _nowhere))
        if kind is None:
            return answer
        if kind == "late after":
            time.sleep(self.hang)
        start("500 Internal Server Error", [("Content-Type", "application/xml")])
        return [_ERROR]


def _nowhere(*_: object) -> None:
    """Takes the head of an answer that nobody is to see."""


@contextmanager
def served(seed: int = 0, timeout: float = 2.0) -> Iterator[FaultyS3]:
    """A server with one empty bucket, which the environment of this process names.

    Args:
        timeout: for how many seconds a client waits for an answer.
    """
    server = FaultyS3(seed, hang=timeout + 0.3)
    known = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
    }
    try:
        with mock.patch.dict(os.environ, known), mock.patch.object(s3_objects, "TIMEOUT", timeout):
            boto3.client("s3").create_bucket(Bucket=BUCKET)
            yield server
    finally:
        server.close()
