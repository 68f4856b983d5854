"""What experiments are run on: models, presses, tasks, and how results are compared."""
