"""Reviews: what a diff costs at run time, and the records of contributors: work logs and proposals."""
