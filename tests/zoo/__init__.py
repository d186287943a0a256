"""Small models of our own, each with one kind of structure that capture has to get right."""
