"""The remote reward against a real server on 127.0.0.1."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from actors.remote_reward import RemoteReward
from actors.reward import RewardPool
from configs.schema import RewardConfig


class Judge(ThreadingHTTPServer):
    """Answers the n-th request with `answer(n, request)`: a status and a body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: Callable[[int, Any], tuple[int, bytes]] = lambda n, request: (200, b'{"rewards": [1]}')
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/judge?key=secret-key"


class Handler(BaseHTTPRequestHandler):
    server: Judge  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        self.server.headers.append(dict(self.headers))
        status, body = self.server.answer(len(self.server.requests), request)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:1/")
        self.end_headers()
        for i in range(0, len(body), 1000):
            self.wfile.write(body[i : i + 1000])
            if status == 299:
                time.sleep(0.2)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[Judge]:
    with Judge() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(reward: RemoteReward, seconds: float = 20, **columns: Any) -> Any:
    return reward(["q", "q"], ["a", "bb"], deadline=time.monotonic() + seconds, **columns)


def test_one_request_carries_the_group_and_its_columns(judge: Judge):
    judge.answer = lambda n, request: (
        200,
        json.dumps({"rewards": [len(text) for text in request["completions"]]}).encode(),
    )
    reward = RemoteReward(url=judge.url)
    assert ask(reward, answer=["7", "7"], completion_ids=[[1], [2, 3]], log_metric=print) == [1, 2]
    assert judge.requests == [
        {"prompts": ["q", "q"], "completions": ["a", "bb"], "answer": ["7", "7"], "completion_ids": [[1], [2, 3]]}
    ]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(judge: Judge, status: int):
    judge.answer = lambda n, request: (status, b"") if n < 3 else (200, b"[0.5, null]")
    assert ask(RemoteReward(url=judge.url)) == [0.5, None]
    assert len(judge.requests) == 3


@pytest.mark.parametrize(
    ("status", "body", "why", "requests"),
    [
        (404, b"", "status 404", 1),
        (302, b"", "status 302", 1),
        (503, b"", "status 503", 2),
        (200, b"<html>", r"its answer is not \{\"rewards\"", 1),
        (200, b'{"reward": 1}', r"its answer is not \{\"rewards\"", 1),
    ],
)
def test_a_server_that_does_not_answer_fails_the_group_in_our_own_words(
    judge: Judge, status: int, body: bytes, why: str, requests: int
):
    judge.answer = lambda n, request: (status, body)
    with pytest.raises(RuntimeError, match=why) as failure:
        ask(RemoteReward(url=judge.url, attempts=2))
    assert "secret" not in str(failure.value)
    assert len(judge.requests) == requests


def test_a_server_that_is_not_there_fails_the_group():
    with pytest.raises(RuntimeError, match=r"no answer \(ConnectionRefusedError\)"):
        ask(RemoteReward(url="http://127.0.0.1:1/x", attempts=2))


def test_there_is_no_attempt_beyond_the_deadline(judge: Judge):
    judge.answer = lambda n, request: (503, b"")
    with pytest.raises(TimeoutError, match="status 503, no time to ask again"):
        ask(RemoteReward(url=judge.url, attempts=100), seconds=1)
    assert 1 < len(judge.requests) < 10


def test_an_answer_byte_by_byte_is_late_as_a_whole(judge: Judge):
    judge.answer = lambda n, request: (299, b"x" * 100_000)  # 20 s
    with pytest.raises(RuntimeError, match=r"no answer \(TimeoutError\)"):
        ask(RemoteReward(url=judge.url, timeout_s=0.5, attempts=1))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "either url or url_env"),
        ({"url": "http://a", "url_env": "JUDGE_URL"}, "either url or url_env"),
        ({"url_env": "JUDGE_URL"}, "there is no variable JUDGE_URL"),
        ({"url": "ftp://secret/x"}, "the address in url is none"),
        ({"url": "http://user:secret@host/"}, "the address in url is none"),
        ({"url": "http://secret:port/"}, "the address in url is none"),
    ],
)
def test_an_address_that_is_none_is_refused_without_being_shown(options: dict[str, str], why: str):
    with pytest.raises(ValueError, match=why) as refusal:
        RemoteReward(**options)  # pyright: ignore[reportArgumentType]
    assert "secret" not in str(refusal.value)


def test_address_and_header_come_from_named_variables_and_are_in_no_log(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("JUDGE_URL", judge.url)
    monkeypatch.setenv("JUDGE_HEADER", "Authorization: Bearer secret-token")
    judge.answer = lambda n, request: (200, b'{"rewards": [1, 0]}') if n == 1 else (400, b"secret-key secret-token")
    config = RewardConfig(
        function="remote",
        options={"url_env": "JUDGE_URL", "header_env": "JUDGE_HEADER"},
        env=["JUDGE_URL", "JUDGE_HEADER"],
    )

    async def work() -> Any:
        pool = RewardPool(config)
        await pool.start(["answer"])
        try:
            [pid] = pool.pids()
            with open(f"/proc/{pid}/cmdline") as file:
                command = file.read()
            return command, [await pool.score("q", ["a", "b"], {"answer": "7"}) for _ in range(2)]
        finally:
            await pool.close()

    with caplog.at_level(logging.DEBUG):
        command, (first, second) = asyncio.run(work())
    assert first == [1.0, 0.0]
    assert second == ["raised: RuntimeError: the server of the reward: status 400"] * 2
    assert judge.headers[0]["Authorization"] == "Bearer secret-token"
    assert "secret" not in command + caplog.text + "".join(capfd.readouterr())
