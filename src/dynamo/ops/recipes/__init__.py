"""Recipes: tested deployments below `recipes/`; which there are, whether one is complete, and how it is adapted. Pure but for the catalog."""
