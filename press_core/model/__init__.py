"""What a press has to know of a model: its attention sites, its rotations, its decoder."""
