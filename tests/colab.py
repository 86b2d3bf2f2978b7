"""A stand-in for Colab: a virtual environment with Colab's packages, and a kernel in it that looks like Colab's.

What is real: the versions of all packages but PyTorch, the kernel, the set-up cell and what pip makes of it, and a
folder with nothing in it but one notebook. What is not: PyTorch is this environment's under another version number,
`google.colab` is empty, and git gets the course from this working tree instead of the address in the set-up cell.
"""

import json
import os
import shutil
import subprocess
import venv
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from kvcourse.paths import models_folder

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = Path(__file__).resolve().parent / "data" / "colab_packages.txt"
KERNEL = "import google.colab; from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"


@dataclass(frozen=True)
class Colab:
    """A virtual environment in `folder`, and a repository that stands for the one at `address`."""

    folder: Path
    repository: Path
    address: str

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def site(self) -> Path:
        [site] = self.folder.glob("lib/python3*/site-packages")
        return site

    @property
    def env(self) -> dict[str, str]:
        """Where git is led to the repository here, and where what the notebook writes goes."""
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return inherited | {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.{self.repository.as_uri()}.insteadOf",
            "GIT_CONFIG_VALUE_0": self.address,
            "IPYTHONDIR": str(self.folder / "ipython"),
            "KVCOURSE_MODELS": str(models_folder()),
            "KVCOURSE_RESULTS": str(self.folder / "results"),
        }

    def copy(self, folder: Path) -> "Colab":
        """The same once more: Colab gives each notebook a fresh machine."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Colab(folder, self.repository, self.address)

    def pip(self, *arguments: str) -> str:
        return run([self.python, "-m", "pip", *arguments], env=self.env)

    def versions(self) -> dict[str, str]:
        return {found["name"]: found["version"] for found in json.loads(self.pip("list", "--format=json"))}

    def execute(self, notebook: nbformat.NotebookNode, folder: Path) -> None:
        """Run all cells in one kernel, as if the notebook lay in `folder`; the first failing cell raises."""
        _Client(self, notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute(env=self.env)


class _Client(NotebookClient):
    def __init__(self, colab: Colab, notebook, **settings):
        super().__init__(notebook, kernel_name="python3", **settings)
        self.colab = colab

    def create_kernel_manager(self):
        manager = super().create_kernel_manager()
        manager.kernel_spec.argv = [self.colab.python, "-c", KERNEL, "-f", "{connection_file}"]
        return manager


def run(command: list[str], **settings) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **settings)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def make_colab(folder: Path, torch_version: str, address: str) -> Colab:
    colab = Colab(folder / "colab", folder / "repository", address)
    venv.create(colab.folder, with_pip=True)
    colab.pip("install", "-q", "--no-deps", "-r", str(PACKAGES))
    (colab.site / "google" / "colab").mkdir(parents=True)
    (colab.site / "google" / "colab" / "__init__.py").touch()
    link_torch(colab.site, torch_version)
    commit_working_tree(colab.repository)
    return colab


def link_torch(site: Path, version: str) -> None:
    """This environment's PyTorch, which pip takes for `version`, and which asks for nothing else."""
    torch = metadata.distribution("torch")
    for name in {file.parts[0] for file in torch.files} - {".."}:
        if not name.endswith(".dist-info"):
            (site / name).symlink_to(torch.locate_file(name))
    info = site / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/INSTALLER,,\n{info.name}/RECORD,,\n")


def commit_working_tree(repository: Path) -> None:
    """A new repository with one commit: what `git add --all` would take here, committed or not."""
    for path in working_tree():
        copy = repository / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    run(["git", "init", "-q", "-b", "main"], cwd=repository)
    run(["git", "add", "--all"], cwd=repository)
    run(["git", *who, "commit", "-q", "-m", "the working tree"], cwd=repository)


def working_tree() -> list[Path]:
    """All files of this checkout that git keeps or would keep."""
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def pins() -> dict[str, str]:
    """Name and version of each package in the list."""
    lines = PACKAGES.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))
