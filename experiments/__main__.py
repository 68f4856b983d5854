"""`python -m experiments`: the front door."""

from experiments.cli import app

app(prog_name="python -m experiments")
