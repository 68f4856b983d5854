"""What presses learn of a model beforehand, and the presses that do."""
