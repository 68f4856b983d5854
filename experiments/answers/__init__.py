"""Sweeps over models, presses, ratios, mechanisms and datasets; `experiments.answers.evaluate` runs them.

`settings` says what is asked for, `datasets` makes the samples, `cells` answers them, `engines`
runs cells one by one or on Ray, and `store` keeps what is finished.
"""
