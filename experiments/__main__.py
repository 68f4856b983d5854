"""Entry point of `python -m experiments`."""

import signal
import warnings

from experiments.cli import app

# Being told to end is like Ctrl-C: what is finished is kept, and no process or file is left behind.
signal.signal(signal.SIGTERM, signal.default_int_handler)
# The name that all supported releases of transformers know.
warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
app(prog_name="python -m experiments")
