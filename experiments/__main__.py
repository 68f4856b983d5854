"""Entry point of `python -m experiments`."""

import signal

from experiments.cli import app

# Being told to end is like Ctrl-C: what is finished is kept, and no process or file is left behind.
signal.signal(signal.SIGTERM, signal.default_int_handler)
app(prog_name="python -m experiments")
