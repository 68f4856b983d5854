"""The formulas of the presses: fields and arithmetic, independent of the mechanism."""
