"""`python -m experiments`: the front door."""

from experiments.cli import app
from experiments.late import import_hqq_late

import_hqq_late()
app(prog_name="python -m experiments")
