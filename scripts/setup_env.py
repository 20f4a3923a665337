#!/usr/bin/env python3
"""Make the virtual environment that `make demo` and `make test` run in.

    python3 scripts/setup_env.py --extra dev [--venv .venv] [--torch auto|cpu|system|default]

Which torch goes in is decided once, here:

- `system`: the torch that this Python already imports. The environment sees the packages already
  installed, and nothing of theirs is upgraded; only what is missing is added.
- `cpu`: the versions of constraints-cpu.txt.
- `default`: whatever torch the index gives, which on Linux is a CUDA build of several GB.
- `auto`: `system` where there is a GPU and a torch, `default` where there is a GPU and no torch,
  and `cpu` everywhere else.

Only the standard library is used, and no syntax newer than Python 3.6, so that an interpreter that
is too old is told so.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST = (3, 10)

# Run inside the new environment: what the project needs there and does not find.
FIND_MISSING = """
import importlib.metadata as md, json, sys
from pip._vendor.packaging.requirements import Requirement
missing = []
for line in md.requires("hsa-compile") or []:
    requirement = Requirement(line)
    needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    optional = not needed and requirement.marker.evaluate({"extra": sys.argv[1]})
    if not (needed or optional):
        continue
    try:
        found = requirement.specifier.contains(md.version(requirement.name), prereleases=True)
    except md.PackageNotFoundError:
        found = False
    if not found:
        text = requirement.name + str(requirement.specifier)
        missing.append({"requirement": text, "optional": not needed})
print(json.dumps(missing))
"""

# Run inside the new environment: pins for all that is installed, so that nothing there changes.
FREEZE = """
import importlib.metadata as md, re
seen = set()
for d in md.distributions():  # of two copies the first is the one imported
    name = d.metadata["Name"]
    if name and name not in seen and re.fullmatch(r"[0-9][0-9A-Za-z.!]*", d.version.split("+")[0]):
        print(name + "==" + d.version)
    seen.add(name)
"""


def say(text):
    print("setup: " + text, flush=True)


def fail(text):
    sys.exit("setup: error: " + text)


def run(command, **kwargs):
    """The finished process, its output kept as text."""
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, **kwargs
    )


def has_gpu():
    if shutil.which("nvidia-smi") is None:
        return False
    done = run(["nvidia-smi", "-L"])
    return done.returncode == 0 and "GPU" in done.stdout


def torch_version(python):
    """The version of the torch that `python` imports, or None."""
    done = run([python, "-c", "import torch; print(torch.__version__)"])
    return done.stdout.split()[-1] if done.returncode == 0 and done.stdout.split() else None


def choose(wanted):
    """The way torch is installed: `system`, `cpu` or `default`, and the line that says why."""
    here = torch_version(sys.executable) if wanted in ("auto", "system") else None
    if wanted == "system" and here is None:
        fail(
            "TORCH=system, but {} imports no torch; set PYTHON to one that does".format(
                sys.executable
            )
        )
    if wanted == "auto":
        if not has_gpu():
            return "cpu", "no GPU found: the CPU versions of constraints-cpu.txt"
        if here is None:
            return "default", "a GPU and no torch: installing torch's default build (several GB)"
        wanted = "system"
    if wanted == "system":
        return wanted, "using the torch already there ({})".format(here)
    if wanted == "cpu":
        return wanted, "the CPU versions of constraints-cpu.txt"
    return wanted, "installing torch's default build"


def sees_system_packages():
    """Whether this Python sees the packages of the system, or only those of its own environment."""
    if sys.prefix == sys.base_prefix:
        return True
    with open(os.path.join(sys.prefix, "pyvenv.cfg")) as f:
        return "include-system-site-packages = true" in f.read()


def make_venv(venv, system):
    """Create the environment afresh and return its Python."""
    shutil.rmtree(venv, ignore_errors=True)
    options = []
    if system:
        # Without a pip and setuptools of its own the environment uses those beside torch.
        options.append("--without-pip")
        if sees_system_packages():
            options.append("--system-site-packages")
    done = run([sys.executable, "-m", "venv"] + options + [venv])
    if done.returncode != 0:
        shutil.rmtree(venv, ignore_errors=True)
        fail(
            "could not create a virtual environment with {}:\n{}\n"
            "On Debian and Ubuntu the package python3-venv is needed.".format(
                sys.executable, done.stdout.strip()
            )
        )
    python = os.path.join(venv, "bin", "python")
    if system and sys.prefix != sys.base_prefix:
        # This Python is itself in a virtual environment, whose packages the new one does not see.
        paths = "import sysconfig as s; print(s.get_path('purelib')); print(s.get_path('platlib'))"
        parents = run([sys.executable, "-c", paths]).stdout.split("\n")
        own = run([python, "-c", paths]).stdout.split("\n")[0]
        with open(os.path.join(own, "parent_environment.pth"), "w") as f:
            for path in sorted({p for p in parents if p}):
                f.write("import site; site.addsitedir({!r})\n".format(path))
    if system and torch_version(python) is None:
        fail("the torch of {} does not import in {}".format(sys.executable, venv))
    if run([python, "-m", "pip", "--version"]).returncode != 0:
        check(run([python, "-m", "ensurepip"]), "installing pip")
    return python


def pip(python, *args):
    return run([python, "-m", "pip", "--disable-pip-version-check", "install", "-q"] + list(args))


def check(done, what):
    if done.returncode != 0:
        fail("{} failed:\n{}".format(what, done.stdout.strip()))


def install_plain(python, extra, cpu):
    say("installing the project and what it needs (a few minutes the first time)")
    constraint = ["-c", os.path.join(ROOT, "constraints-cpu.txt")] if cpu else []
    check(pip(python, *constraint, "-e", "{}[{}]".format(ROOT, extra)), "pip install")


def install_beside_system_torch(python, extra):
    before = torch_version(python)
    project = ["--no-deps", "-e", ROOT]
    done = pip(python, "--no-build-isolation", *project)
    if done.returncode != 0:
        check(pip(python, *project), "pip install")
    done = run([python, "-c", FIND_MISSING, extra])
    check(done, "looking for missing packages")
    missing = json.loads(done.stdout.strip().split("\n")[-1])
    if any(m["requirement"].startswith("torch") for m in missing):
        fail(
            "torch {} is already there and this project does not work with it (see pyproject.toml); "
            "choose another Python with PYTHON=..., or TORCH=default for a torch of its own".format(
                before
            )
        )
    if missing:
        names = [m["requirement"] for m in missing]
        say("adding what is missing: " + ", ".join(names))
        with tempfile.TemporaryDirectory() as folder:
            pins = os.path.join(folder, "installed.txt")
            with open(pins, "w") as f:
                f.write(run([python, "-c", FREEZE]).stdout)
            # One by one, so that what can be had is had.
            failed = [
                m for m in missing if pip(python, "-c", pins, m["requirement"]).returncode != 0
            ]
        needed = [m["requirement"] for m in failed if not m["optional"]]
        if needed:
            fail("could not install {}; is there a network?".format(", ".join(needed)))
        if failed:
            say(
                "could not install {}; what needs them is skipped or says so".format(
                    ", ".join(m["requirement"] for m in failed)
                )
            )
    after = torch_version(python)
    if after != before:
        fail("torch changed from {} to {}".format(before, after))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--venv", default=os.path.join(ROOT, ".venv"))
    parser.add_argument("--extra", default="dev", help="the optional dependencies wanted")
    parser.add_argument("--torch", default="auto", choices=["auto", "cpu", "system", "default"])
    args = parser.parse_args()

    if sys.version_info < OLDEST:
        fail(
            "Python {}.{} or newer is needed and {} is {}; choose one with PYTHON=...".format(
                OLDEST[0], OLDEST[1], sys.executable, ".".join(map(str, sys.version_info[:3]))
            )
        )

    how, why = choose(args.torch)
    say(why)
    marker = os.path.join(args.venv, "torch-from")
    made_with = ""
    if os.path.exists(marker):
        with open(marker) as f:
            made_with = f.read().strip()
    # A finished environment of the same kind is added to; any other is made again.
    key = "{} {} {}".format(how, sys.version.split()[0], sys.prefix)
    python = os.path.join(args.venv, "bin", "python")
    if made_with != key or not os.path.exists(python):
        python = make_venv(args.venv, system=how == "system")
        with open(marker, "w") as f:
            f.write(key + "\n")
    if how == "system":
        install_beside_system_torch(python, args.extra)
    else:
        install_plain(python, args.extra, cpu=how == "cpu")
    if how == "cpu" and not any(
        shutil.which(c) for c in ("g++", "clang++", os.environ.get("CXX", ""))
    ):
        say("warning: no C++ compiler (g++ or clang++); torch.compile needs one on a CPU")
    say("torch {} in {}".format(torch_version(python), os.path.relpath(args.venv)))


if __name__ == "__main__":
    main()
