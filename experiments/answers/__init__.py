"""Long-context answers: an answerer, datasets and metrics, and sweeps that can be interrupted.

`answerer` answers questions from a compressed context. Of a sweep `settings` says what is asked
for, `datasets` makes the samples, `cells` answers them, `engines` runs cells one by one or on Ray,
`store` keeps what is finished, and `sweep` is the command.
"""
