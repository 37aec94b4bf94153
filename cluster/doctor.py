"""Does the stack work on this machine? Imports what everything stands on and says how to mend what does not."""

import importlib.metadata
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

PACKAGES = ("torch", "transformers", "peft", "ray", "deepspeed", "datasets", "vllm")
ADVICE = {
    "torchvision": "it was built for another torch: pip uninstall torchvision torchaudio torchcodec",
    "undefined symbol": "packages built for different versions of torch: make clean, then make setup",
    "No module named": "a package is missing: make setup installs the stack",
    "libcudart": "a CUDA build on a machine without CUDA: make clean, then make setup",
    "libGL": "a system library is missing: apt-get install libgl1",
}


def check(package: str) -> str | None:
    """Import `package` in a process of its own. None when that works, else what is wrong."""
    done = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True, timeout=300)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    advice = next((text for sign, text in ADVICE.items() if sign in done.stderr), "make clean, then make setup")
    return f"{lines[-1]}\n    {advice}"


def main() -> int:
    """Print a line for each package. Returns the number of packages that do not work."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    began = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        problems = list(workers.map(check, PACKAGES))
    for package, problem in zip(PACKAGES, problems, strict=True):
        distribution = importlib.metadata.packages_distributions().get(package, [package])[0]
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        print(f"  {package:13s} {version:14s} {problem or 'ok'}")
    print(f"  checked in {time.monotonic() - began:.0f} s on {os.cpu_count()} cores")
    return sum(problem is not None for problem in problems)


if __name__ == "__main__":
    sys.exit(min(1, main()))
