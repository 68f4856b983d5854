"""One part for each question of the study."""
