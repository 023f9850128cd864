"""Make what peers.py runs its peers in: virtual environments and models, under ``.peers/``, as ``peers.toml`` says.

    python benchmarks/peers/install.py [--into DIR] [--torch-index URL] [NAME ...]

What is there already is kept; with names, only those environments and their models are made, without all that peers are
run in: ``vllm-0.31``, which only tests use, is made by its name. Wheels of torch without CUDA come from the index that
``--torch-index`` names, as for ``make setup``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def make_environment(name: str, about: dict[str, Any], peers: Path, torch_index: str) -> None:
    """Make one virtual environment, unless it is there as asked."""
    folder = peers / name
    stamp, asked = folder / "installed.json", json.dumps(about)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == asked:
        return
    print(f"installing {' '.join(about['packages'])} into {folder} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q"]
    env = {**os.environ, **about.get("env", {})}
    if "torch" in about:  # first and alone, so that its index serves nothing else
        index = ["--index-url", torch_index] if torch_index else []
        subprocess.run([*pip, "install", *index, f"torch=={about['torch']}"], check=True, env=env)
    subprocess.run([*pip, "install", *about["packages"]], check=True, env=env)
    if "uninstall" in about:
        subprocess.run([*pip, "uninstall", "-y", *about["uninstall"]], check=True, env=env)
    stamp.write_text(asked, encoding="utf-8")


def make_model(name: str, about: dict[str, Any], peers: Path) -> None:
    """Convert the model for one peer, unless that was done."""
    from pagefold.config import cache_dir
    from pagefold.hub.catalog import resolve

    folder = peers / "models" / name
    if folder.is_dir():
        return
    print(f"converting the model to {folder} ...", flush=True)
    source = str(resolve("smollm2-135m", cache_dir()))
    program, *arguments = (each.format(folder=source) for each in about["command"])
    unfinished = folder.with_suffix(".unfinished")
    binary = peers / about["environment"] / "bin" / program
    subprocess.run([binary, *arguments, unfinished], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    unfinished.rename(folder)


def main() -> None:
    """Install what was asked for."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = tomllib.loads((HERE.parent / "peers.toml").read_text(encoding="utf-8"))
    environments = about["environments"]
    options.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(environments)}; all peers' if none")
    options.add_argument("--into", type=Path, default=HERE.parents[1] / ".peers", metavar="DIR")
    options.add_argument("--torch-index", default="", metavar="URL")
    args = options.parse_args()
    if unknown := set(args.names) - set(environments):
        options.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(environments)}")
    peers = args.into.resolve()
    (peers / "models").mkdir(parents=True, exist_ok=True)
    peers_own = [name for name, one in environments.items() if not one.get("made_by_name_only")]
    for name in args.names or peers_own:
        make_environment(name, environments[name], peers, args.torch_index)
    for name, model in about["models"].items():
        if model["environment"] in (args.names or peers_own):
            make_model(name, model, peers)


if __name__ == "__main__":
    main()
