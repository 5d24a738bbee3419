"""What `analyze` writes: numbers, pictures and a page."""
