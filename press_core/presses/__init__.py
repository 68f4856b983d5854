"""The formulas: fields and arithmetic, whatever installs them."""
