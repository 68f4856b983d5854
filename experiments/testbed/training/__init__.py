"""How the models that ship with the experiments were trained."""
