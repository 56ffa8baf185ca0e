"""The whole chain from a model to a saved ensemble, and the search for the best one."""
