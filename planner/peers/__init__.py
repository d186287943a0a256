"""Other planners' inputs and objectives, as their publications and code define them."""
