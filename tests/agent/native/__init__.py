"""C libraries that stand in for a driver's, compiled by the tests with the machine's own compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def compile_library(source: str, soname: str, folder: Path) -> Path:
    """Compiles *source* to *folder*/*soname*; put the folder into LD_LIBRARY_PATH before a process starts."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no C compiler on this machine")
    target = folder / soname
    if not target.exists():
        flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-Wl,-soname,{soname}"]
        subprocess.run([gcc, *flags, "-o", str(target), str(HERE / source)], check=True)
    return target
