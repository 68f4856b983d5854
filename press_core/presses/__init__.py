"""One file per method: its hyperparameters, and its formula in plain tensor arithmetic."""
