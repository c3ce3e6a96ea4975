"""Clone inventory: copies of values in Rust and Python sources, ranked by the path they are on and by how likely one can go."""
