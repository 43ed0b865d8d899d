"""Makes a checkout with the real run.sh. All programs that it starts are stubs."""

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

from table import ROOT

# The programs that run.sh and the stubs use
PROGRAMS = [
    "bash",
    "sh",
    "env",
    "cat",
    "chmod",
    "cksum",
    "cp",
    "cut",
    "dirname",
    "flock",
    "grep",
    "head",
    "ln",
    "mkdir",
    "mktemp",
    "mount",
    "nproc",
    "readlink",
    "rm",
    "sleep",
    "tail",
    "tr",
    "uname",
    "unshare",
    "wc",
]

# Imitates `python3 -m venv`, without the seconds that the real pip takes. It sleeps at a place
# where an interruption leaves no pip.
PYTHON = """#!/bin/sh
real={real}
if [ "$1 $2" = "-m venv" ]; then
    shift 2
    for folder; do :; done
    "$real" -m venv --without-pip "$@" || exit
    sleep "${{VENV_SECONDS:-0}}"
    case "$*" in *--without-pip*) exit ;; esac
    cp -r {pip} {pip}-1.0.dist-info "$folder"/lib/python*/site-packages/
    exit
fi
exec "$real" "$@"
"""

# Imitates pip: it writes its arguments to $CALLS, and installs stubs of packages. It sleeps at a
# place where an interruption leaves a package half installed.
PIP = """
import json, os, pathlib, sys, sysconfig, time

arguments = sys.argv[1:]
with open(os.environ["CALLS"], "a", encoding="utf-8") as file:
    file.write(" ".join(arguments) + "\\n")

def install(requirement):
    name, _, version = requirement.partition("==")
    site = pathlib.Path(sysconfig.get_paths()["purelib"])
    info = site / f"{name}-{version or 1}.dist-info"
    info.mkdir(exist_ok=True)
    version = version or "1"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    time.sleep(float(os.environ.get("PIP_SECONDS", 0)))
    (site / name).mkdir(exist_ok=True)
    text = os.environ.get("TORCH", "") if name == "torch" else ""
    (site / name / "__init__.py").write_text(text)
    (info / "RECORD").write_text(f"{name}/__init__.py,,\\n{info.name}/METADATA,,\\n")

if arguments[0] == "config":
    print(os.environ.get("PIP_SETTINGS", ""))
elif arguments[0] == "index":
    sys.exit("no answer" if os.environ.get("INDEX_IS_DOWN") else 0)
elif arguments[0] == "install":
    if os.environ.get("PIP_ERROR"):
        sys.exit(os.environ["PIP_ERROR"])
    for i, argument in enumerate(arguments):
        if arguments[i - 1] == "-r":
            for line in pathlib.Path(argument).read_text().split():
                install(line)
        elif "==" in argument:
            install(argument)
"""

# Imitates PyTorch, which can use $USABLE GPUs
TORCH = """
import os
class cuda:
    is_available = lambda: cuda.device_count() > 0
    device_count = lambda: int(os.environ.get("USABLE", "0"))
class version:
    cuda = os.environ.get("TORCH_CUDA")
    hip = os.environ.get("TORCH_HIP")
"""

# Imitates tools/launch_checks.py: it prints the log's folder, the processes, and $CHECKED
CHECK = """
import os, sys
print("stub checks", sys.argv[1:], file=sys.stderr)
if os.environ.get("CHECK_ERROR"):
    sys.exit(2)
print("log_dir=my logs")
print("processes=" + os.environ.get("USABLE", "1"))
print(os.environ.get("CHECKED", "CHECKED="))
"""

TRAIN = """
import os, pathlib, sys, time
import torch, tqdm
if __name__ == "__main__":
    print("stub trains", sys.argv[1:], sys.executable, torch.__file__, flush=True)
    print("environment:", {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "REASON")})
    time.sleep(float(os.environ.get("TRAIN_SECONDS", 0)))
    pathlib.Path("my logs").mkdir(exist_ok=True)
    pathlib.Path("my logs", f"{time.time_ns()}.pt").write_text("")
    print("stub trained")
    sys.exit(int(os.environ.get("TRAIN_STATUS", 0)))
else:
    open(os.environ["CALLS"] + "_imported", "w").close()
"""

SAMPLE = """
import sys
print("stub samples", sys.argv[1:])
"""

DATA = """
import pathlib, sys, time, os
time.sleep(float(os.environ.get("DATA_SECONDS", 0)))
folder = pathlib.Path(__file__).parent / "{folder}"
folder.mkdir(exist_ok=True)
for split in ("train", "val"):
    (folder / f"{name}_{{split}}_000000.bin").write_text("")
"""


def write(path: Path, text: str, executable=False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if executable:
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def write_amd_gpu(folder: Path, mib: int) -> None:
    """Writes the files of AMD's driver, for a GPU of this size."""
    write(folder / "dev" / "kfd", "")
    write(folder / "graphics" / "card1" / "device" / "mem_info_vram_total", f"{mib * 2**20}\n")


def write_program(folder: Path, name: str, text: str) -> Path:
    """Writes a shell script next to the other programs for the checkouts in `folder`."""
    return write(folder / "bin" / name, f"#!/bin/sh\n{text}\n", executable=True)


def make_checkout(folder: Path, name="checkout") -> Path:
    """Makes folder/name with run.sh and stubs, and folder/bin with the programs that it may use."""
    checkout = folder / name
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for program in PROGRAMS:
        found = shutil.which(program)
        if found and not (programs / program).exists():
            (programs / program).symlink_to(found)
    real = sys._base_executable
    write(programs / "python3", PYTHON.format(real=real, pip=programs / "pip"), executable=True)
    write(programs / "pip" / "__init__.py", "")
    write(programs / "pip" / "__main__.py", PIP)
    info = programs / "pip-1.0.dist-info"
    write(info / "METADATA", "Metadata-Version: 2.1\nName: pip\nVersion: 1.0\n")
    files = ["pip/__init__.py", "pip/__main__.py", f"{info.name}/METADATA", f"{info.name}/RECORD"]
    write(info / "RECORD", "".join(f"{file},,\n" for file in files))
    checkout.mkdir()
    shutil.copy(ROOT / "run.sh", checkout)
    write(checkout / "requirements.txt", "torch==2.13.0\ntqdm==4.70.1  # a comment\n")
    for group in ("tools", "data", "evals", "tests"):
        write(checkout / group / "requirements.txt", f"{group}_package==1.0\n")
    write(checkout / "train_gpt.py", TRAIN)
    write(checkout / "tools" / "launch_checks.py", CHECK)
    write(checkout / "evals" / "sample.py", SAMPLE)
    for name in ("compare", "screen"):
        write(
            checkout / "tools" / f"{name}.py",
            f"import os, sys, tools_package\nprint('stub {name}:', sys.argv[1:])\n",
        )
    write(
        checkout / "data" / "shakespeare.py", DATA.format(folder="shakespeare", name="shakespeare")
    )
    write(
        checkout / "data" / "cached_fineweb10B.py", DATA.format(folder="fineweb10B", name="fineweb")
    )
    return checkout


def environment(folder: Path, **changes) -> dict:
    """Environment variables with which run.sh finds only the stubs. None removes a variable."""
    (folder / "dev").mkdir(exist_ok=True)
    variables = dict(
        PATH=folder / "bin",
        HOME=folder / "home",
        CALLS=folder / "calls",
        TORCH=TORCH,
        SPEEDRUN_DEVICES=folder / "dev",
        SPEEDRUN_GRAPHICS=folder / "graphics",
        SPEEDRUN_TORCH_INDEX="http://torch.invalid",
        PIP_CONFIG_FILE=os.devnull,
        PIP_NO_INDEX="1",  # should a bug of run.sh reach the real pip, it installs nothing
    )
    variables |= changes
    return {name: str(value) for name, value in variables.items() if value is not None}


def calls(folder: Path) -> list[str]:
    """The installations that pip was asked for, since the last call of this function."""
    file = folder / "calls"
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    file.unlink()
    return [line for line in lines if line.startswith("install")]


# -----------------------------------------------------------------------------
# Other machines

OLD_PYTHON = """if [ "$1" = --version ]; then echo Python 3.10.13; exit; fi
exit 1"""

# Two GPUs with the driver $DRIVER
NVIDIA_SMI = r"""case "$*" in
    -L) printf 'GPU 0: NVIDIA H100\nGPU 1: NVIDIA H100\n' ;;
    *driver_version*) printf "$DRIVER\n$DRIVER\n" ;;
esac"""


def system_torch(checkout, version):
    """Makes a base Python with a PyTorch of its own, on a path that run.sh can't unset."""
    site = checkout.parent / "system"
    write(site / "torch" / "__init__.py", "from_system = True\n")
    write(
        site / f"torch-{version}.dist-info" / "METADATA",
        f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
    )
    base = checkout.parent / "base"
    subprocess.run([sys._base_executable, "-m", "venv", "--without-pip", base], check=True)
    next(base.rglob("site-packages")).joinpath("system.pth").write_text(f"{site}\n")
    shim = checkout.parent / "bin" / "python3"
    # A virtual environment can't pass its packages on to another one, so a .pth file does it
    text = shim.read_text().replace(sys._base_executable, str(base / "bin" / "python"))
    text = text.replace(
        "    sleep",
        f'    case "$*" in *--system-site-packages*) '
        f'echo {site} >"$(echo "$folder"/lib/python*/site-packages)"/system.pth ;; esac\n    sleep',
    )
    shim.write_text(text)
    return site


def without_ensurepip(checkout, has_pip):
    """Imitates the Python of Debian, which lacks ensurepip. Its pip knows --python."""
    shim = checkout.parent / "bin" / "python3"
    pip = checkout.parent / "bin" / "pip"
    answers = f"""
case "$*" in
    *"import venv, ensurepip"*) exit 1 ;;
    *"import venv, pip"*) exit {0 if has_pip else 1} ;;
    "-m pip --python"*) cp -r {pip} {pip}-1.0.dist-info .venv/lib/python*/site-packages/ && exit ;;
esac
"""
    shim.write_text(shim.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{answers}"))


# -----------------------------------------------------------------------------
# The real pip, with stubs of packages in wheels


def write_wheel(folder: Path, name: str, version: str, files: dict) -> None:
    """Writes a wheel for any Python and machine, from files {path: text}."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = files | {f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for path, text in files.items():
            file.writestr(path, text)


def use_real_pip(folder: Path, python=None) -> dict:
    """Lets run.sh use a real Python. Returns variables with which pip only uses folder/wheels."""
    shim = folder / "bin" / "python3"
    shim.unlink()
    shim.symlink_to(python or sys._base_executable)
    many = {f"torch/part_{i}.py": "" for i in range(3000)}  # an installation that takes a moment
    write_wheel(folder / "wheels", "torch", "2.13.0", many | {"torch/__init__.py": TORCH})
    write_wheel(folder / "wheels", "tqdm", "4.70.1", {"tqdm/__init__.py": ""})
    return dict(PIP_NO_INDEX="1", PIP_FIND_LINKS=folder / "wheels")
