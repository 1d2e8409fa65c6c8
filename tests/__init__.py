"""Lets the tests import the Python code of scripts/, data/ and dev/."""
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("scripts", "data", "dev/ci")]
