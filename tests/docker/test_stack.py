"""The compose file; and, where a Docker engine answers, the whole stack for real."""

import json
import os
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = ROOT / "docker/compose.yaml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]


def test_every_published_port_is_on_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert sorted(ports) == [f"127.0.0.1:{n}:{n}" for n in (3000, 8265, 8265, 9090)]
    assert not any("network_mode" in service for service in SERVICES.values())


def test_rays_containers_ask_for_a_token() -> None:
    for name in ("head", "trainer", "head-gpu", "trainer-gpu"):
        assert SERVICES[name]["environment"]["RAY_AUTH_MODE"] == "token", name
        assert "token:/token" in SERVICES[name]["volumes"], name


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_profile_has_a_head_a_trainer_and_the_watchers(profile: str) -> None:
    suffix = "" if profile == "cpu" else "-gpu"
    names = {name for name, service in SERVICES.items() if profile in service["profiles"]}
    assert names == {f"head{suffix}", f"trainer{suffix}", "prometheus", "grafana"}
    assert SERVICES[f"trainer{suffix}"]["depends_on"] == {f"head{suffix}": {"condition": "service_healthy"}}


def test_every_mounted_folder_of_the_repository_exists() -> None:
    mounts = [volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])]
    assert [mount for mount in mounts if mount.startswith(".") and not (FILE.parent / mount).is_dir()] == []


def test_images_are_pinned() -> None:
    assert all(":" in service["image"] and not service["image"].endswith(":latest") for service in SERVICES.values())


def compose(*arguments: str, timeout: float) -> str:
    command = ["docker", "compose", "-p", "accredit-test", "-f", str(FILE), "--profile", "cpu", *arguments]
    done = subprocess.run(
        command, env=os.environ | {"ARGS": "steps=2"}, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def engine() -> bool:
    try:
        for command in (["docker", "info"], ["docker", "compose", "version"]):
            subprocess.run(command, capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


@pytest.mark.timeout(3600)
def test_the_stack_trains_and_prometheus_sees_it() -> None:
    if not engine():
        pytest.skip("no Docker engine with compose answers")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    query = urllib.parse.urlencode({"query": "ray_accredit_reward_mean"})
    try:
        compose("up", "--build", "--detach", timeout=2400)
        compose("wait", "trainer", timeout=600)
        found, until = [], time.monotonic() + 120
        while not found and time.monotonic() < until:
            time.sleep(2)
            with opener.open(f"http://127.0.0.1:9090/api/v1/query?{query}", timeout=10) as answer:
                found = json.load(answer)["data"]["result"]
        assert [row["metric"]["run"] for row in found] == ["demo"]
    finally:
        compose("down", "--volumes", timeout=120)
