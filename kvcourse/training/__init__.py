"""How the course's own small models are made: the stories they read, the recipe, the run, the files shipped."""
