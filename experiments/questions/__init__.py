"""One module per question of the study."""
