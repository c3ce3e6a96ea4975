"""Import paths of earlier releases."""
