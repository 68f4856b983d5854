"""Calibrations that presses learn on a model beforehand, and the presses that use them."""
