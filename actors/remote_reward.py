"""`remote`: rewards from an HTTP server. One POST of a group's JSON, one JSON answer.

The address and the header are secrets: no message, log or process list shows them, so that errors of the libraries
below are told in our own words. Redirects are not followed: they would take the header elsewhere.
"""

import http.client
import json
import os
import time
from typing import Any
from urllib.parse import urlsplit

ANSWER_BYTES = 16 << 20
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0  # between two attempts; doubled each time
AGAIN = {408, 425, 429, 500, 502, 503, 504}
NOT_SENT = {"trainer_state", "log_extra", "log_metric"}


class RemoteReward:
    """POSTs {"prompts", "completions", "completion_ids", every other column}, and expects {"rewards": [...]}, a number
    or null for each completion.

    The address is `url`, or stands in the environment variable `url_env`; `header_env` names one with a header as
    `Name: value`. Both have to be listed in reward.env. What fails for a moment (no connection, no answer within
    `timeout_s`, status 408, 425, 429, 5xx) is tried again, up to `attempts` times and as long as the group has time.
    """

    def __init__(
        self,
        url: str = "",
        url_env: str = "",
        header_env: str = "",
        timeout_s: float = 5.0,
        attempts: int = 4,
    ) -> None:
        if bool(url) == bool(url_env):
            raise ValueError("options: expected either url or url_env")
        address = urlsplit(url or _variable(url_env))
        try:
            self._host, self._port = address.hostname or "", address.port
        except ValueError:
            self._host = ""
        if address.scheme not in ("http", "https") or not self._host or address.username:
            raise ValueError(f"the address in {url_env or 'url'} is none: expected http(s)://host[:port]/path")
        self._secure = address.scheme == "https"
        self._path = (address.path or "/") + (f"?{address.query}" if address.query else "")
        self._headers = {"Content-Type": "application/json"}
        if header_env:
            name, colon, value = _variable(header_env).partition(":")
            if not colon or not name.strip() or not f"{name}{value}".isprintable():
                raise ValueError(f"the header in {header_env} is none: expected Name: value")
            self._headers[name.strip()] = value.strip()
        self.timeout_s, self.attempts = timeout_s, attempts

    def __call__(self, prompts: list[Any], completions: list[Any], deadline: float, **columns: Any) -> list[Any]:
        given = {name: values for name, values in columns.items() if name not in NOT_SENT}
        body = json.dumps({**given, "prompts": prompts, "completions": completions}).encode()
        wait, said = FIRST_WAIT_S, ""
        for attempt in range(self.attempts):
            until = min(deadline, time.monotonic() + self.timeout_s)
            try:
                status, answer = self._post(body, until)
            except (OSError, http.client.HTTPException) as error:
                said = f"no answer ({type(error).__name__})"
            else:
                if status == 200:
                    return _rewards(answer)
                said = f"status {status}"
                if status not in AGAIN:
                    break
            if attempt + 1 < self.attempts:
                if time.monotonic() + wait >= deadline:
                    raise TimeoutError(f"the server of the reward: {said}, no time to ask again")
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT_S)
        raise RuntimeError(f"the server of the reward: {said}")

    def _post(self, body: bytes, until: float) -> tuple[int, bytes]:
        """Status and answer. Raises OSError (TimeoutError, when it takes until `until`) or HTTPException."""
        connect = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=_left(until))
        try:
            connection.request("POST", self._path, body, self._headers)
            response = connection.getresponse()
            chunks = []
            while chunk := response.read1(1 << 16):  # a server that answers byte by byte is late as a whole
                chunks.append(chunk)
                if sum(map(len, chunks)) > ANSWER_BYTES:
                    raise http.client.HTTPException("the answer is too long")
                left = _left(until)
                if connection.sock:
                    connection.sock.settimeout(left)
            return response.status, b"".join(chunks)
        finally:
            connection.close()


def _variable(name: str) -> str:
    if name not in os.environ:
        raise ValueError(f"there is no variable {name}: expected it in the environment, and its name in reward.env")
    return os.environ[name]


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _rewards(answer: bytes) -> list[Any]:
    try:
        decoded = json.loads(answer)
        rewards = decoded["rewards"] if isinstance(decoded, dict) else decoded
    except (ValueError, KeyError, RecursionError):
        rewards = None
    if not isinstance(rewards, list):
        raise RuntimeError('the server of the reward: its answer is not {"rewards": [...]}')
    return rewards
