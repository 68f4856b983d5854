"""Long-context answers: an answerer, datasets and metrics, and sweeps that can be interrupted.

`answerer` answers questions about a compressed context. For a sweep, `settings` defines the grid,
`datasets` makes the samples, `cells` answers them, `engines` runs cells one by one or on Ray,
`store` saves finished cells, and `sweep` is the command.
"""
