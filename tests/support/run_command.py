"""Runs a command to its end, for tests."""
import subprocess


def run_command(command, expect=0, **how):
    """Runs a command, which must end with this exit code; None: with any. Returns what subprocess.run() does."""
    done = subprocess.run(command, **{"capture_output": True, "text": True, "timeout": 300, "check": False, **how})
    if expect is not None and done.returncode != expect:
        raise AssertionError(f"exit code {done.returncode}, not {expect}, of {command}\n{done.stdout[-3000:]}\n"
                             f"{done.stderr[-3000:]}")
    return done
