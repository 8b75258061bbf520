"""What is installed is what stands in the repository."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import nvdd_md

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("calculators", "integrators")


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder and return what came of it."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def modules_on_disk() -> set[str]:
    """Return the path of every module inside the installed package, links followed."""
    own = {
        path.relative_to(ROOT)
        for path in (ROOT / "nvdd_md").rglob("*.py")
        if path.relative_to(ROOT).parts[1] not in LINKED
    }
    linked = {
        Path("nvdd_md") / path.relative_to(ROOT)
        for top in LINKED
        for path in (ROOT / top).rglob("*.py")
    }
    return {path.as_posix() for path in own | linked}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what a build needs, so that building leaves nothing in the repository."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    for name in ("nvdd_md", *LINKED):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    return folder


def test_packages_on_disk_are_the_packages_listed():
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    on_disk = {str(Path(path).parent).replace("/", ".") for path in modules_on_disk()}
    assert set(listed) == on_disk
    assert len(listed) == len(on_disk)


@pytest.mark.parametrize("name", LINKED)
def test_link_is_a_link(name):
    link = ROOT / "nvdd_md" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize("name", LINKED)
def test_link_is_a_link_in_git(name):
    command = ["git", "ls-files", "--stage", f"nvdd_md/{name}"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    mode = listed.split()[0] if listed else "not tracked"
    assert mode == "120000", "git stores it as something else than a symbolic link"


@pytest.mark.parametrize("name", LINKED)
def test_bare_name_is_refused(name):
    result = python("-c", f"import {name}", cwd=ROOT)
    assert result.returncode != 0
    assert f"ImportError: this package was imported as '{name}'" in result.stderr
    assert f"use 'import nvdd_md.{name}' instead" in result.stderr


@pytest.mark.parametrize("name", LINKED)
def test_full_name_works_in_an_uninstalled_clone(name, sources):
    code = f"import nvdd_md.{name} as p; print(p.__file__)"
    result = python("-c", code, cwd=sources)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == sources / "nvdd_md" / name / "__init__.py"


def test_wheel_has_every_module(sources, tmp_path):
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
    result = python("-m", "pip", "wheel", *options, str(sources), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"nvdd_md-{nvdd_md.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name for name in names if name.endswith(".py")}
    assert packaged == modules_on_disk()
    assert "nvdd_md/py.typed" in names


def test_wheel_from_the_source_archive_has_every_module(sources, tmp_path):
    build = "import sys; from setuptools import build_meta as b; print(b.build_sdist(sys.argv[1]))"
    result = python("-c", build, str(tmp_path), cwd=sources)
    assert result.returncode == 0, result.stdout + result.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    test_wheel_has_every_module(unpacked, tmp_path)
